"""A model and its optimizer as a list of named parts, and back."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trireme import _C
from trireme._C import (
    CheckpointSource,
    CheckpointTensor,
    KeptCodes,
    check_codes,
    has_memory,
    load_codes,
)
from trireme._core.announced_writes import before_writing
from trireme._core.compression import codes_in
from trireme._core.owners import ShardedOptimizer
from trireme._core.writing import sharding_optimizers, writing, writing_shards
from trireme._saving.frozen import KIND as FROZEN
from trireme._saving.frozen import frozen_to_save, has_frozen, load_frozen
from trireme._saving.optimizer import FILE, KIND, LoadedOptimizer, OptimizerParts, plain_json
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
    plain_name,
    resharded_model,
)
from trireme._saving.stages import names_of_all, some_rank_has

MODEL = "model"
CODES = "compression"
EXTRA = "extra.json"


@dataclass
class Content:
    """This rank's part, by kind and file name; see csrc/saving/checkpoint.h."""

    tensors: dict[str, list[CheckpointTensor]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def content_to_save(
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: dict[str, Any] | None,
    ranks: Ranks,
    *,
    copies: bool = False,
    has_state: bool = True,
) -> Content:
    """What this rank writes; the optimizer's state if ``has_state``. ``copies``: of what a forward,
    a backward or another rank's step writes it has copies.

    Raises:
        ValueError, TypeError: it cannot be saved.
    """
    content = content_of(model, optimizer if has_state else None, ranks, copies=copies)
    content.tensors.update(frozen_to_save(model, ranks))
    codes = _C.codes_to_save(codes_of(model, optimizer, ranks))
    if codes is not None:
        content.tensors[CODES] = [tensor.copied() for tensor in codes] if copies else codes
    if extra is not None and ranks.rank == 0:
        content.texts[EXTRA] = json.dumps(plain_json(extra, "`extra`", ranks))
    return content


def tensors_written_with(model: nn.Module, optimizer: Optimizer | None) -> list[torch.Tensor]:
    """The parameters whose announced writes are writes of what is saved."""
    found: list[torch.Tensor] = list(resharded_model(model).parameters())
    inner = optimizer.optim if isinstance(optimizer, ShardedOptimizer) else None
    for one in (optimizer, inner):
        for group in () if one is None else one.param_groups:
            found.extend(group["params"])
    return list(filter(has_memory, found))


def content_of(
    model: nn.Module, optimizer: Optimizer | None, ranks: Ranks, *, copies: bool = False
) -> Content:
    """What this rank writes, or holds, of a model and its optimizer.

    Raises:
        ValueError, TypeError: it cannot be saved.
    """
    content = Content()
    expect_plain_states(model, ranks)
    named = named_tensors(model, ranks)
    content.tensors[MODEL] = [
        *model_to_save(named, ranks, copies=copies),
        *TensorsElsewhere(model).to_save(ranks),
    ]
    if optimizer is not None:
        parts = OptimizerParts(optimizer, named, ranks)
        content.tensors[KIND], content.texts[FILE] = parts.to_save()
    return content


def codes_of(model: nn.Module, optimizer: Optimizer | None, ranks: Ranks) -> list[KeptCodes]:
    """What compression keeps, by the names of the plain model."""
    found = [*codes_in(model), *([] if optimizer is None else codes_in(optimizer))]
    if not found:
        return found
    names = {id(named.tensor): named.name for named in named_tensors(model, ranks)}
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
    before_writing()
    with ranks.together():
        expect_plain_states(model, ranks)
        elsewhere = TensorsElsewhere(model)
        needed = [*model_to_load(model, ranks), *elsewhere.to_load(ranks)]
    has_optimizer = some_rank_has(optimizer, model, ranks) if asks else optimizer is not None
    kinds = [MODEL, *([KIND] if has_optimizer else []), *([CODES] if has_codes else [])]
    source.verify([*kinds, *([FROZEN] if has_frozen(source, model) else [])])
    source.check(MODEL, needed)
    with ranks.together():
        codes = codes_of(model, optimizer, ranks) if has_codes else []
        check_codes(codes, source, (ranks.rank, ranks.world))
    loaded = _read_optimizer(source, model, optimizer, ranks, asks) if has_optimizer else None
    plain = resharded_model(model)
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
    load_frozen(source, model, ranks)


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
