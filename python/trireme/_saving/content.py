"""A model and its optimizer as a list of named parts, and back."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from trireme._C import CheckpointSource, CheckpointTensor, KeptCodes, check_codes, load_codes
from trireme._core.compression import codes_in
from trireme._core.writing import sharding_optimizers, writing, writing_shards
from trireme._saving.optimizer import FILE, KIND, LoadedOptimizer, OptimizerParts
from trireme._saving.own_ways import (
    TensorsElsewhere,
    expect_plain_states,
    finish_loading,
    has_to_finish,
)
from trireme._saving.parts import (
    Ranks,
    model_to_load,
    model_to_save,
    named_tensors,
    plain_model,
    plain_name,
)
from trireme._saving.stages import names_of_all, some_rank_has

MODEL = "model"


@dataclass
class Content:
    """This rank's part, by kind and file name; see csrc/saving/checkpoint.h."""

    tensors: dict[str, list[CheckpointTensor]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def content_of(model: nn.Module, optimizer: Optimizer | None, ranks: Ranks) -> Content:
    """What this rank writes, or holds, of a model and its optimizer.

    Raises:
        ValueError, TypeError: it cannot be saved.
    """
    content = Content()
    expect_plain_states(model, ranks)
    content.tensors[MODEL] = [
        *model_to_save(model, ranks),
        *TensorsElsewhere(model).to_save(ranks),
    ]
    if optimizer is not None:
        parts = OptimizerParts(optimizer, named_tensors(model, ranks), ranks)
        content.tensors[KIND], content.texts[FILE] = parts.to_save()
    return content


def codes_of(model: nn.Module, optimizer: Optimizer | None, ranks: Ranks) -> list[KeptCodes]:
    """What compression keeps, by the names of the plain model."""
    names = {id(named.tensor): named.name for named in named_tensors(model, ranks)}
    found = [*codes_in(model), *([] if optimizer is None else codes_in(optimizer))]
    for kept in found:
        own = zip(kept.tensors, kept.names, strict=True)
        kept.rename([names.get(id(tensor), plain_name(name)) for tensor, name in own], "")
    return found


def load_content(
    source: CheckpointSource,
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: Ranks,
    *,
    asks: bool,
    has_codes: bool = False,
) -> None:
    """Loads into this rank's parts; ``asks``: ranks may have different parameters; ``has_codes``:
    what compression keeps is loaded, too. Collective."""
    with ranks.together():
        expect_plain_states(model, ranks)
        elsewhere = TensorsElsewhere(model)
        needed = [*model_to_load(model, ranks), *elsewhere.to_load(ranks)]
    source.check(MODEL, needed)
    with ranks.together():
        codes = codes_of(model, optimizer, ranks) if has_codes else []
        check_codes(codes, source, (ranks.rank, ranks.world))
    has_optimizer = some_rank_has(optimizer, model, ranks) if asks else optimizer is not None
    loaded = _read_optimizer(source, model, optimizer, ranks, asks) if has_optimizer else None
    plain = plain_model(model)
    with writing_shards(plain), torch.no_grad():
        source.read(MODEL, [*model_to_load(model, ranks), *elsewhere.to_load(ranks)])
        with ranks.together():
            elsewhere.put()
    finishes = has_to_finish(model)
    if ranks.any(finishes) if asks else finishes:  # all ranks have whole parameters by now
        with ExitStack() as stack, torch.no_grad():
            for optimizer_ in sharding_optimizers(plain):
                stack.enter_context(writing(optimizer_))
            with ranks.together():
                finish_loading(model, ranks)
    if has_optimizer:
        with ranks.together():
            if loaded is not None:
                loaded.put_into_optimizer()
    load_codes(codes, source, (ranks.rank, ranks.world))


def _read_optimizer(
    source: CheckpointSource,
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: Ranks,
    asks: bool,
) -> LoadedOptimizer | None:
    """Reads this rank's part, to be put in place; None where it has no optimizer."""
    parts = loaded = None
    with ranks.together():
        if optimizer is not None:
            parts = OptimizerParts(optimizer, named_tensors(model, ranks), ranks)
    own = [] if parts is None else parts.names()
    names = names_of_all(own, ranks) if asks else own
    with ranks.together():
        if parts is not None:
            loaded = parts.to_load(source, names)
    source.read(KIND, [] if loaded is None else loaded.tensors)
    return loaded
