"""What the engine is told of the stages of a rank."""

from __future__ import annotations

from collections.abc import Sequence

from trireme._C import PipelineStageRequest
from trireme._pipeline.stages import HeldTensors, StageCalls, held_by


def requests_of(calls: Sequence[StageCalls], last: int) -> list[PipelineStageRequest]:
    """Returns one for each stage; ``last`` is the number of the one that has the loss."""
    return [
        PipelineStageRequest(
            stage=call.stage.number,
            name=str(call.stage),
            forward=call.forward,
            loss=call.loss if call.stage.number == last else None,
            parameters=held.parameters,
            buffers=held.buffers,
            strategies=held.strategies,
            sends_gradients=call.sends_gradients,
        )
        for call, held in zip(calls, held_by_calls(calls), strict=True)
    ]


def held_by_calls(calls: Sequence[StageCalls]) -> list[HeldTensors]:
    """Returns parameters and buffers by stage, each once."""
    seen: set[int] = set()
    return [held_by(call.held(), seen) for call in calls]
