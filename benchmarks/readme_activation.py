"""Writes the tables of bench_activation.py, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from measure import pages
from measure.pages import Blocks, Json
from readme_steps import RATIO, TARGET


def _rows(part: str) -> Callable[[Json], Iterable[Json]]:
    return lambda results: results.get(part, {}).get("rows", ())


def _outcome(part: str) -> Callable[[Json], str]:
    shown = f"trireme / torch: {RATIO}, target {TARGET}."
    return lambda results: shown.format_map(results[part])


PEAKS = pages.Table(
    "`bench_activation.py`, a step of `gpt` with 24 blocks in one process: what its activations "
    "take at the fullest moment, beside what `plan --checkpoint` says beforehand (auto at half of "
    "never):",
    {
        "checkpoints": "{checkpoint}",
        "MiB at most": "{measured_mib:.0f}",
        "as planned": "{planned_mib:.0f}",
        "ratio": "{share:.2f}",
        "target: within 10 %": "{verdict}",
    },
    "peak",
)
STEPS = pages.Table(
    "Forward and backward of `gpt` with each block in a checkpoint:",
    {"": "{label}", "ms": "{step_ms:.0f}", "of the time without": "{beside_plain:.3f}"},
    _rows("steps"),
    foot=[_outcome("steps")],
)
CPP = pages.Table(
    "In C++, every block in a checkpoint, beside a plain step that runs each block twice by hand:",
    {
        "model": "`{model}`",
        "plain step, ms": "{once_ms:.1f}",
        "blocks twice, ms": "{twice_ms:.1f}",
        "checkpoints, ms": "{checkpointed_ms:.1f}",
        "checkpoints / twice (quartiles)": RATIO,
        "target": TARGET,
    },
    "cpp",
)
CALLS = pages.Table(
    "What a checkpoint of `Linear(8, 8)` adds to forward, backward and a second forward:",
    {"": "{label}", "us": "{added_us:.1f}", "functions of Python": "{calls}"},
    _rows("call"),
    foot=[_outcome("call")],
)
PLACES = {"memory": "the memory of the host", "folder": "a folder"}
OFFLOAD = pages.Table(
    "`gpt` with what its blocks save offloaded (on the CPU the memory of the host is where it is "
    "already), beside the longer of a plain step and a copy of as many bytes there and back:",
    {
        "to": lambda row: PLACES[row["where"]],
        "MiB": "{mib:.0f}",
        "step, ms": "{step_ms:.0f}",
        "plain step, ms": "{plain_ms:.0f}",
        "copy, ms": "{copy_ms:.0f}",
        "ratio (quartiles)": RATIO,
        "target": TARGET,
    },
    "offload",
)


def activation_tables(results: Json) -> Blocks:
    """Yields every part that was run."""
    for part in (PEAKS, STEPS, CPP, CALLS, OFFLOAD):
        yield from part(results)
    yield pages.measured_on(results)
