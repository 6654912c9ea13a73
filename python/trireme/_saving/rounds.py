"""Rounds between workers in a checkpoint; see csrc/strategies/local_sgd/rounds_checkpoint.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trireme import _C
from trireme._C import CheckpointSource, PrefixedSource, RoundPart
from trireme._core.held_rounds import HeldRounds, HoldsRounds
from trireme._core.owners import ShardedOptimizer, optimizer_of
from trireme._saving.content import MODEL, Content, load_content
from trireme._saving.optimizer import OptimizerParts, Stepped
from trireme._saving.parts import (
    NamedTensor,
    Part,
    Ranks,
    ShardedParts,
    named_tensors,
    part_of,
    resharded_model,
)

KIND = "rounds"


def add_rounds(
    content: Content,
    rounds: HoldsRounds,
    model: nn.Module,
    optimizer: Optimizer | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Puts what workers have agreed on in place of the parameters in ``content``, and adds what
    each worker has. Collective."""
    ranks = Ranks(group, shares_writing=False)
    with ranks.together():
        held = _held(rounds, model, optimizer, ranks)
        if not held.core.has_agreed():
            held.core.take_anchors()
        parts = _PartsOfRounds(held, ranks)
    held.core.wait_for_fragment()
    tensors = content.tensors.setdefault(KIND, [])
    with ranks.together():
        content.tensors[MODEL] = _C.anchors_to_save(held.core, parts.core, content.tensors[MODEL])
        tensors += _C.rounds_to_save(held.core, parts.core)
    for prefix, worker, states in parts.optimizers():
        with ranks.together():
            own, text = states.to_save()
        merged = _C.merge_texts_of(worker, text, ranks.core)
        tensors += [_C.renamed(tensor, prefix) for tensor in own]
        tensors.append(_C.text_as_tensor(prefix, merged))


def load_rounds(
    source: CheckpointSource,
    rounds: HoldsRounds,
    model: nn.Module,
    optimizer: Optimizer | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Loads model, optimizers and rounds. Collective."""
    ranks = Ranks(group, shares_writing=False)
    with ranks.together():
        held = _held(rounds, model, optimizer, ranks)
    source.verify([KIND])
    has_rounds = bool(source.tensors(KIND))
    inner = None if has_rounds else held.optimizer
    load_content(source, model, inner, ranks, asks=False, has_codes=True)
    if not has_rounds:
        held.core.take_anchors()
        held.core.restart()
        return
    with ranks.together():
        parts = _PartsOfRounds(held, ranks)
    is_same = _C.load_rounds(held.core, parts.core, source)
    if not is_same:
        _stepping(held.optimizer).state.clear()
    for prefix, worker, states in parts.optimizers():
        if is_same or worker < 0:
            _load_optimizer(PrefixedSource(source, KIND, prefix, ranks.core), states, ranks)


def _held(
    rounds: HoldsRounds, model: nn.Module, optimizer: Optimizer | None, ranks: Ranks
) -> HeldRounds:
    """Raises TypeError and ValueError for what are no rounds, or those of something else."""
    if not isinstance(rounds, HoldsRounds):
        ranks.refuse(
            f"got {type(rounds).__name__} as rounds, expected a LocalSGD or DiLoCo",
            "Pass what trains the model, or leave it out.",
            kind=TypeError,
        )
    held = rounds._held()
    if held.model is not resharded_model(model) or optimizer not in (None, held.optimizer):
        ranks.refuse(
            "got rounds over another module or optimizer",
            "Pass those that the rounds were made for.",
        )
    return held


class _PartsOfRounds:
    """Which parts of parameters and anchors this rank has."""

    def __init__(self, held: HeldRounds, ranks: Ranks) -> None:
        self._held, self._ranks = held, ranks
        self._named = named_tensors(held.model, ranks)
        names = {id(named.tensor): named for named in self._named}
        self._parts: dict[int, Part] = {}
        sharded: dict[ShardedOptimizer, ShardedParts] = {}
        self.core: list[RoundPart] = []
        for param in held.parameters:
            named, sharding = names[id(param)], optimizer_of(param)
            if sharding is None:
                part = part_of(named, ranks)
            else:
                known = sharded.setdefault(sharding, ShardedParts(sharding))
                part = known.part_of(param)
            self._parts[id(param)] = part
            self.core.append(RoundPart(named.name, list(part.shape), list(part.first)))

    def optimizers(self) -> Iterator[tuple[str, int, OptimizerParts]]:
        """Prefix, worker and states; worker -1 where all have the same."""
        worker = self._held.core.worker
        inner = OptimizerParts(self._held.optimizer, self._named, self._ranks)
        yield f"worker {worker}:optimizer:", worker, inner
        for number, optimizer in enumerate(self._held.outer):
            yield f"outer {number}:", -1, self._outer(optimizer)

    def _outer(self, optimizer: Optimizer) -> OptimizerParts:
        """Names the anchors that an outer optimizer steps by the parameters."""
        targets, parts = [], {}
        for named in self._named:
            target = self._held.targets.get(named.tensor)
            if target is None:
                continue
            targets.append(NamedTensor(named.name, target, is_buffer=False))
            if id(named.tensor) in self._parts and target.numel() > 0:
                parts[id(target)] = self._parts[id(named.tensor)]
        return _OuterParts(optimizer, targets, self._ranks, parts)


class _OuterParts(OptimizerParts):
    """An outer optimizer over this rank's parts of the anchors."""

    def __init__(
        self,
        optimizer: Optimizer,
        targets: Sequence[NamedTensor],
        ranks: Ranks,
        parts: dict[int, Part],
    ) -> None:
        self._parts_of_targets = parts
        super().__init__(optimizer, targets, ranks)

    def _stepped(self, named: NamedTensor, param: torch.Tensor) -> Stepped:
        part = self._parts_of_targets.get(id(param))
        if part is None:  # nothing is stepped here
            nothing = Part(param.shape, (0,), torch.Size([0]))
            return Stepped(named.name, param, nothing, owner=0)
        return Stepped(named.name, param, part, owner=None)


def _load_optimizer(source: CheckpointSource, states: OptimizerParts, ranks: Ranks) -> None:
    with ranks.together():
        loaded = states.to_load(source, states.names())
    source.read("optimizer", loaded.tensors)
    with ranks.together():
        loaded.put_into_optimizer()


def _stepping(optimizer: Optimizer) -> Optimizer:
    return optimizer.optim if isinstance(optimizer, ShardedOptimizer) else optimizer
