"""Draws README's picture of what bench_steps.py measured, and says what belongs to a strategy."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from readme_tables import Json

ROUNDS = 7  # sides that met others have as many runs

# The labels of each strategy; where there are several, the fastest one counts.
STRATEGIES: Mapping[str, Sequence[str]] = {
    "1 process x 2 threads": ["1 process"],
    "torch DDP": ["torch-ddp", "torch-ddp + view", "torch-ddp + view + batched"],
    "torch ZeRO 1": ["torch-zero1", "torch-zero1 + view"],
    "torch FSDP2": [
        "torch-fsdp2",
        "torch-fsdp2, kept",
        "torch-fsdp2, foreach",
        "torch-fsdp2, kept, foreach",
    ],
    "DataParallel": ["dp"],
    "DDP": ["ddp"],
    "ZeRO 1": ["zero1"],
    "ZeRO 2": ["zero2"],
    "ZeRO 2, `trireme.optim`": ["zero2, trireme.optim"],
    "fully_shard": ["fsdp"],
    "fully_shard, `trireme.optim`": ["fsdp, trireme.optim"],
}
PICTURED = ("1 process x 2 threads", "torch DDP", "torch FSDP2", "DDP", "ZeRO 2", "fully_shard")
PICTURED_WORKLOADS = ("mlp", "gpt-small-batch", "gpt")
TITLE = (
    "Milliseconds per step on the 2 cores of one machine, less is better: "
    "1 process with 2 threads, and every strategy as 2 ranks of 1 thread each"
)


def steps_of(workload: Json) -> dict[str, float]:
    """Returns the median step by label."""
    return {
        label: statistics.median(run["step_ms"] for run in runs)
        for label, runs in workload["runs"].items()
    }


def fastest_ms(workload: Json, strategy: str) -> float | None:
    """Returns the median step of a strategy's fastest label that ran."""
    steps = steps_of(workload)
    return min((steps[label] for label in STRATEGIES[strategy] if label in steps), default=None)


def pictured(results: Json) -> dict[str, dict[str, float]]:
    """Returns what the picture shows: ms by workload and strategy."""
    return {
        name: {
            strategy: round(taken, 1)
            for strategy in PICTURED
            if (taken := fastest_ms(results["workloads"][name], strategy))
        }
        for name in PICTURED_WORKLOADS
        if name in results["workloads"]
    }


def picture_is_current(results: Json, path: Path) -> bool:
    """Returns whether the picture at `path` was drawn from these results."""
    return path.exists() and _figures(results) in path.read_text()


def draw(results: Json, caption: str, path: Path) -> None:
    """Writes the picture at the head of README as SVG."""
    from measure.step_picture import draw_steps

    draw_steps(pictured(results), TITLE, caption, _figures(results), path)


def _figures(results: Json) -> str:
    return "figures: " + json.dumps(pictured(results)).replace('"', "'")


def met_often(workload: Json) -> Iterator[tuple[str, float]]:
    """Yields label and median step of the sides that ran in all rounds."""
    most = max(map(len, workload["runs"].values()))
    steps = steps_of(workload)
    for label, runs in workload["runs"].items():
        if len(runs) >= min(ROUNDS, most):
            yield label, steps[label]
