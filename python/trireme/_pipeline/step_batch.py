"""The batch of a step, dealt out to the stages of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trireme._pipeline.micro_batches import BatchCut
from trireme._pipeline.stages import MicroBatches, StageCalls


@dataclass
class StepBatch:
    """What a step was given, and how it is cut."""

    cut: BatchCut
    inputs: tuple[Any, ...]
    names: Sequence[str]
    """What the first layer calls the inputs."""
    target: Any
    keywords: dict[str, Any]


def dealt_out(calls: Sequence[StageCalls], given: StepBatch) -> MicroBatches:
    """Returns what the micro-batches of these stages need of a batch."""
    cut = given.cut.cut
    made = MicroBatches(versions=given.cut.versions, names=given.names)
    if any(call.stage.number == 0 for call in calls):
        made.inputs = list(zip(*map(cut, given.inputs), strict=True))
    asked = {name for call in calls for name in call.keywords}
    whole = {**dict(zip(given.names, given.inputs, strict=False)), **given.keywords}
    if given.target is not None:
        whole["target"] = given.target
        made.targets = cut(given.target)
    made.keywords = {name: cut(value) for name, value in whole.items() if name in asked}
    return made
