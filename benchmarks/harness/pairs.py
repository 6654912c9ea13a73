"""Two sides measured in pairs of fresh processes, in alternating order: drift and order cancel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.nn.parallel import DistributedDataParallel

Result = TypeVar("Result")


@dataclass(frozen=True)
class Side:
    """One strategy with one set of options; `optimizer` says whose AdamW it steps."""

    label: str
    strategy: str
    options: Mapping[str, Any]
    optimizer: str = "torch"


OURS = {
    "gloo": Side("ddp", "ddp-gloo", {}),
    "gloo-view": Side("ddp + view", "ddp-gloo", {"gradient_as_bucket_view": True}),
    "shm": Side("ddp, shared memory", "ddp", {}),
}
TORCH_VIEW = Side("torch-ddp + view", "torch-ddp", {"gradient_as_bucket_view": True})
TORCH_BATCHED = Side(
    "torch-ddp + view + batched",
    "torch-ddp",
    {"gradient_as_bucket_view": True, "batched_grad_copy": True},  # not in every torch
)
TORCH = tuple(
    side
    for side in (Side("torch-ddp", "torch-ddp", {}), TORCH_VIEW, TORCH_BATCHED)
    if set(side.options) <= set(inspect.signature(DistributedDataParallel).parameters)
)


@dataclass(frozen=True)
class Pairs(Generic[Result]):
    """`ours[i]` and `theirs[i]` ran one after the other; odd pairs in reversed order."""

    ours: list[Result]
    theirs: list[Result]


def measure_all(
    sides: Sequence[Side], repeats: int, measure: Callable[[Side], Result]
) -> dict[str, list[Result]]:
    """Every side `repeats` times, there and back, by label."""
    found: dict[str, list[Result]] = {side.label: [] for side in sides}
    for repeat in range(repeats):
        for side in sides if repeat % 2 == 0 else list(reversed(sides)):
            found[side.label].append(measure(side))
    return found


def measure_pairs(
    ours: Side, theirs: Side, count: int, measure: Callable[[Side], Result]
) -> Pairs[Result]:
    """A-B, B-A, A-B, ... `count` times."""
    pairs: Pairs[Result] = Pairs([], [])
    for pair in range(count):
        runs = [(ours, pairs.ours), (theirs, pairs.theirs)]
        for side, results in runs if pair % 2 == 0 else reversed(runs):
            results.append(measure(side))
    return pairs
