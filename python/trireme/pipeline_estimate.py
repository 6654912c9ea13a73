"""What each rank of a pipeline will take, told before there is one: docs/pipeline.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trireme._pipeline import refuse
from trireme._pipeline.cut import stages_of
from trireme._pipeline.measure import MeasuredLayer, measure_layers
from trireme._pipeline.schedule import PipelineSchedule
from trireme._pipeline.stages import Balance, Stage, deal_out, layers_of
from trireme.memory_estimate import MemoryBytes, estimate_memory

_Times = tuple[Sequence[float], Sequence[float], Sequence[float], float]


@dataclass(frozen=True)
class RankOfPipeline:
    """What one rank has. Activations are those at its fullest moment, without the loss, and
    without messages on their way."""

    rank: int
    stages: list[Stage]
    micro_batches: int
    """How many forwards wait for their backward at most."""
    taken: MemoryBytes
    bubble: float
    """The share of a step in which it computes nothing."""


@dataclass(frozen=True)
class PipelineEstimate:
    """What :func:`estimate_pipeline` says."""

    numel: int
    layers: int
    bubble: float
    """The mean over ranks."""
    ranks: list[RankOfPipeline]


def estimate_pipeline(
    module: nn.Module,
    sample: Any,
    schedule: PipelineSchedule,
    *,
    balance: Balance = None,
    optimizer: str | int = "adamw",
    grad_dtype: torch.dtype | None = None,
) -> PipelineEstimate:
    """Says what each rank of a pipeline keeps in memory, and how long it computes nothing.

    Layers run on ``sample`` once or a few times; on device "meta" nothing is allocated.

    Args:
        module: a ``torch.nn.Sequential``.
        sample: what its first layer is called with: one micro-batch.
        schedule: of the pipeline.
        balance: as for ``Pipeline``. With "time" bubbles are those of the times measured, of which
            a backward is half for inputs and half for weights; else all stages take as long.
        optimizer, grad_dtype: as for :func:`estimate_memory`.

    Raises:
        ValueError, TypeError: what cannot be a pipeline. What a layer raises comes out as it is.
    """
    layers = layers_of(module)
    assert isinstance(module, nn.Sequential)
    if len(layers) < schedule.stages:
        got = f"got {len(layers)} layers for {schedule.stages} stages, expected one for each"
        refuse(got, "Use fewer ranks, or fewer stages per rank.")
    is_measured = isinstance(balance, str)
    counts = deal_out(module, schedule.stages, balance, sample if is_measured else None)
    stages = stages_of(list(layers), counts, schedule.stage_rank)
    # Each stage as a whole saves once what several of its layers need.
    whole = [nn.Sequential(*(layers[name] for name in stage.layers)) for stage in stages]
    measured = measure_layers(nn.Sequential(*whole), sample)
    times = _times(measured) if balance == "time" else ([1.0], [1.0], [1.0], 0.0)
    bubbles = _bubbles(schedule, times)
    ranks = []
    for rank in range(schedule.ranks):
        own = [stage for stage in stages if stage.rank == rank]
        estimate = estimate_memory(
            nn.Sequential(*(layers[name] for stage in own for name in stage.layers)),
            "single",
            1,
            optimizer=optimizer,
            grad_dtype=grad_dtype,
            activation_bytes=peak_bytes(
                schedule,
                rank,
                [layer.activation_bytes for layer in measured],
                [layer.input_bytes for layer in measured],
            ),
        )
        live = schedule.peak_activations(rank)
        ranks.append(RankOfPipeline(rank, own, live, estimate.rank, bubbles[rank]))
    numel = sum(parameter.numel() for parameter in module.parameters())
    return PipelineEstimate(numel, len(layers), sum(bubbles) / len(bubbles), ranks)


def peak_bytes(
    schedule: PipelineSchedule, rank: int, bytes_of: Sequence[int], inputs_of: Sequence[int]
) -> int:
    """The most bytes that forwards of a rank keep for their backward, by those of each stage for
    one micro-batch. What I needs is kept until W. What R computes once more is kept from then on,
    and before only its input."""
    row = [action for action in schedule.rows[rank] if action is not None]
    parts = [part for action in row for part in action.sub_actions or [action]]
    again = {(part.stage, part.micro_batch) for part in parts if part.kind == "R"}
    held = peak = 0
    for part in parts:
        if part.stage is None:
            continue
        kept, given = bytes_of[part.stage], inputs_of[part.stage]
        if part.kind == "F":
            held += given if (part.stage, part.micro_batch) in again else kept
        elif part.kind == "R":
            held += kept - given
        elif part.kind in ("B", "W"):
            held -= kept
        peak = max(peak, held)
    return peak


def _times(measured: Sequence[MeasuredLayer]) -> _Times:
    halves = [layer.backward_seconds / 2 for layer in measured]
    return ([layer.forward_seconds for layer in measured], halves, halves, 0.0)


def _bubbles(schedule: PipelineSchedule, times: _Times) -> list[float]:
    timed = schedule._core.timeline(times)
    makespan = max(until for *_, until in timed)
    busy = [0.0] * schedule.ranks
    for rank, _, begin, until in timed:
        busy[rank] += until - begin
    return [1 - seconds / makespan if makespan > 0 else 0.0 for seconds in busy]
