"""Gradients of parameters, by who holds which part of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trireme import _C
from trireme._core.owners import local_of, optimizer_of, stages_of, unit_of


class _Over(NamedTuple):
    """The ranks that shard, how many of them have the same part, where they talk; the ranks of a
    pipeline."""

    sharers: _C.Communicator | None
    copies: int
    device: torch.device
    stages: _C.Communicator | None

    def part(self, counted: list[torch.Tensor], elsewhere: list[torch.Tensor]) -> _C.GradNormPart:
        return _C.GradNormPart(
            counted,
            device=self.device,
            sharded_over=self.sharers,
            copies=self.copies,
            counted_elsewhere=elsewhere,
            stages=self.stages,
        )


class GradParts:
    """The gradients of the parameters that were added, whole or in shards, as the core takes them
    for a norm. The same on all ranks, also where one of them has no gradient."""

    def __init__(self, stages: _C.Communicator | None = None) -> None:
        """``stages``: the ranks of a pipeline, on which this one may have no parameter."""
        self.cut_by_others: list[torch.Tensor] = []
        """Parameters that torch has sharded."""
        self._whole: list[torch.Tensor] = []
        self._of_zero: dict[tuple[_C.Zero, _C.Communicator | None], list[int]] = {}
        # Those that this rank counts, and those that others do.
        self._sharded: dict[_Over, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._cut_in_stages: dict[tuple[_Over, Any], list[torch.Tensor]] = {}  # a list per mesh
        if stages is not None:
            self._sharded[_Over(None, 1, stages.device, stages)] = ([], [])

    def add(self, parameter: torch.Tensor) -> None:
        """Takes the gradient of a parameter, if it has one. Collective as ``norm_over`` of units
        is."""
        stages = stages_of(parameter)
        if in_shards(parameter):
            optimizer: Any = optimizer_of(parameter)
            number, index = optimizer._places[parameter]
            over_stages = None if stages is None else stages.norm_over_stages()
            key = (optimizer._cores[number], over_stages)
            return self._of_zero.setdefault(key, []).append(index)
        over = _over(parameter)
        is_cut_by_others = unit_of(parameter) is None and _is_cut(parameter)
        if is_cut_by_others and over is None:
            self.cut_by_others.append(parameter)
        counted, elsewhere = (
            (self._whole, self._whole) if over is None else self._sharded.setdefault(over, ([], []))
        )
        if parameter.grad is None:
            return None
        is_counted = stages is None or all(parameter is not copy for copy in stages.later_copies())
        if is_cut_by_others and over is not None and is_counted:
            mesh = getattr(parameter, "device_mesh", None)
            self._cut_in_stages.setdefault((over, mesh), []).append(parameter.grad)
            is_counted = False
        (counted if is_counted else elsewhere).append(local_of(parameter.grad))
        return None

    @property
    def are_sharded(self) -> bool:
        """Whether Trireme has sharded any of them, or dealt them out to stages."""
        return bool(self._of_zero or self._sharded)

    def cut_in_stages(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Gradients of one mesh of torch's in a stage, and the list to which what counts in their
        place is added."""
        for (over, _), gradients in self._cut_in_stages.items():
            yield gradients, self._sharded[over][0]

    def parts(self) -> list[_C.GradNormPart]:
        """What the core takes."""
        parts = [_C.GradNormPart(self._whole)] if self._whole else []
        parts += [_C.GradNormPart.of_zero(zero, its, s) for (zero, s), its in self._of_zero.items()]
        return parts + [over.part(*gradients) for over, gradients in self._sharded.items()]


def in_shards(parameter: torch.Tensor) -> bool:
    """Whether an optimizer leaves this rank a shard of its gradient alone (ZeRO 2)."""
    optimizer = optimizer_of(parameter)
    return optimizer is not None and optimizer.stage == 2


def _over(parameter: torch.Tensor) -> _Over | None:
    unit, stages = unit_of(parameter), stages_of(parameter)
    sharers = None if unit is None else unit.norm_over(parameter)
    over_stages = None if stages is None else stages.norm_over_stages()
    if sharers is not None:
        return _Over(*sharers, over_stages)
    return None if over_stages is None else _Over(None, 1, over_stages.device, over_stages)


def _is_cut(parameter: torch.Tensor) -> bool:
    """Whether it is a DTensor of which ranks have parts."""
    return any(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))
