"""Which layers to recompute, chosen by a budget of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trireme import _C
from trireme._activation import AREA, refuse
from trireme._activation.activation_costs import LayerCost

Layer = LayerCost | Mapping[str, Any]
_MOST_BYTES = 2**63 - 1  # that the core counts with


@dataclass(frozen=True)
class CheckpointPlan:
    """Which layers of a sequence are checkpointed, each by itself."""

    recompute: tuple[bool, ...]
    """By layer."""
    bytes: int
    """What is held at the fullest moment: by layers that are not recomputed what autograd saves, by
    others their inputs, and by the one that is just recomputed both."""
    extra_time: float
    """Of the forwards that run twice, in the unit of the layers' times."""


def checkpoint_plan(layers: Iterable[Layer], budget_bytes: int) -> CheckpointPlan:
    """Says which layers to recompute so that the rest fits a budget at the least extra time.

    It is pure. The choice is exact, or leaves a thousandth of the budget unused where more than
    4,096 combinations are worth a look.

    Args:
        layers: What :func:`measure_activations` returns, or for each layer a dict with ``bytes``
            (what autograd saves in its forward), ``time`` (of that forward, in any unit) and
            ``kept`` (what remains where it is checkpointed: the bytes of its inputs; 0 if left
            out).
        budget_bytes: What may be held at any moment.

    Raises:
        TypeError: An argument of another type.
        ValueError: Negative costs; a budget that no choice fits: the text names the least.
    """
    budget = _bytes("budget_bytes", budget_bytes)
    return CheckpointPlan(*_plan(_C.checkpoint_plan(**_columns(layers), budget_bytes=budget)))


def plan_of(layers: Iterable[Layer], recompute: Sequence[bool]) -> CheckpointPlan:
    """Says what a given choice holds and costs."""
    return CheckpointPlan(*_plan(_C.plan_of(**_columns(layers), recompute=list(recompute))))


def plan_in_segments(layers: Sequence[LayerCost], segments: int) -> CheckpointPlan:
    """Says what :func:`checkpoint_sequential` holds with so many segments; each is one layer of the
    plan, and the last is not recomputed."""
    bounds = _C.segment_bounds(len(layers), segments)
    runs = [layers[begin:end] for begin, end in itertools.pairwise(bounds)]
    merged = [
        LayerCost(
            name=f"{run[0].name} to {run[-1].name}",
            bytes=sum(layer.bytes for layer in run),
            kept=run[0].kept,
            output_bytes=run[-1].output_bytes,
            time=sum(layer.time for layer in run),
        )
        for run in runs
    ]
    return plan_of(merged, [True] * (segments - 1) + [False])


def _plan(found: tuple[list[bool], int, float]) -> tuple[tuple[bool, ...], int, float]:
    recompute, held, extra_time = found
    return tuple(recompute), held, extra_time


def _columns(layers: Iterable[Layer]) -> dict[str, list[Any]]:
    given = [_as_dict(number, layer) for number, layer in enumerate(layers)]
    return {
        "bytes": [_bytes("bytes", layer["bytes"]) for layer in given],
        "times": [_time(layer["time"]) for layer in given],
        "kept": [_bytes("kept", layer.get("kept", 0)) for layer in given],
    }


def _as_dict(number: int, layer: Layer) -> Mapping[str, Any]:
    if isinstance(layer, LayerCost):
        return vars(layer)
    if not isinstance(layer, Mapping):
        got = f"layer {number} is {type(layer).__name__}, expected a dict or a LayerCost"
        refuse(got, "Pass what measure_activations() returns.", kind=TypeError)
    given = set(layer)
    known = {"bytes", "time", "kept", "name", "output_bytes"}
    if not {"bytes", "time"} <= given <= known:
        got = f"layer {number} has {sorted(given)}, expected 'bytes', 'time' and perhaps 'kept'"
        refuse(got, "Pass dict(bytes=, time=) for each layer.")
    return layer


def _bytes(name: str, value: Any) -> int:
    AREA.expect(name, value, int, "int", next_step="Pass a whole number of bytes.")
    return min(int(value), _MOST_BYTES)


def _time(value: Any) -> float:
    AREA.expect("time", value, (int, float), "a number", next_step="Pass any unit of time.")
    return float(value)
