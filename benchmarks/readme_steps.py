"""Declares what bench_steps.py measured: ratios, where the time of a step goes, and a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from readme_tables import Blocks, Json, Rows, Table, found, markdown, measured_on

ROUNDS = 7  # sides that met others have as many runs
PHASES = ("step", "forward", "backward", "optimizer")

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


def contests(results: Json, ours: str = "", theirs: str = "") -> Rows:
    """Yields who met whom on which workload, with the steps of all sides.

    `ours`, `theirs`: how the labels begin.
    """
    for _, row in found(results, "workloads/{workload}/contests"):
        if row["ours"].startswith(ours) and row["theirs"].startswith(theirs):
            steps = steps_of(results["workloads"][row["workload"]])
            sides = {"us_ms": steps.get(row["ours"]), "them_ms": steps.get(row["theirs"])}
            yield {**row, **sides, "steps": steps}


def contest_table(ours: str = "") -> Table:
    """Returns the contests of sides whose label begins so."""
    return Table(
        partial(contests, ours=ours),
        "`bench_steps.py`, medians of a step in ms, fresh processes in paired rounds:",
        "workload = `{workload}` | trireme = {us_ms:.0f} ({ours}) | "
        "measured against = {them_ms:.0f} ({theirs}) | ratio (quartiles) = {ratio:ratio} | "
        "1 process x 2 threads = {steps[1 process]:.0f} | "
        "2 ranks, no sync = {steps[no sync]:.0f}",
        foot=[measured_on],
    )


def ddp_tables(results: Json) -> Blocks:
    """Yields the contests of DDP, its peak memory beside torch's, and what averaging adds."""
    yield from contest_table("ddp")(results)
    peaks, added = [], []
    for name, workload in results["workloads"].items():
        if "memory" in workload:
            peaks.append(f"{workload['memory']['ratio']:.2f} (`{name}`)")
        taken = steps_of(workload)
        if "ddp" in taken and "no sync" in taken:
            added.append(f"{taken['ddp'] - taken['no sync']:.0f} ms (`{name}`)")
    if peaks:
        yield f"Peak memory of a rank, ddp / torch-ddp + view: {', '.join(peaks)}."
    if added:
        more = "; ".join(added)
        yield f"A step of DDP takes longer than one of ranks that never talk by {more}."


def added_per_gradient(results: Json) -> Blocks:
    """Yields what the reducer alone adds to a gradient, beside torch's fastest option set."""
    reducer = results.get("reducer", {})
    added = {  # ms for the 1,000 parameters of bench_overheads.py, so us for one
        label: statistics.median(run["wrapped_ms"] - run["bare_ms"] for run in sides)
        for label, sides in reducer.get("runs", {}).items()
    }
    for row in reducer.get("contests", ()):
        ours, theirs = row["ours"], row["theirs"]
        yield (
            "The reducer alone, with 1,000 tiny gradients and no communication, adds per gradient "
            f"{added[ours]:.1f} us ({ours}) beside {added[theirs]:.1f} us ({theirs}), ratio "
            f"{row['ratio']['median']:.2f}."
        )


def phases(results: Json) -> Blocks:
    """Yields where the time of every side's steps goes, a table per workload."""
    shown = " | ".join(f"{phase} = {{in_label[{phase}_ms]:.1f}}" for phase in PHASES)
    for name, workload in results["workloads"].items():
        yield from Table(
            "runs/{label}",
            f"`{name}`:",
            f"ms = {{label}} | {shown} | runs = {{runs}}",
            each=lambda row: {**row, "runs": len(row["in_label"])},
        )(workload)


def strategy_table(results: Json) -> Blocks:
    """Yields all strategies side by side, in parts of the time that torch's DDP takes."""
    yield "Step time, 2 ranks x 1 thread, the fastest of torch's DDP = 1:"
    workloads = results["workloads"]
    rows = []
    for strategy in STRATEGIES:
        row = {"strategy": strategy}
        for name, workload in workloads.items():
            taken, torchs = _fastest_ms(workload, strategy), _fastest_ms(workload, "torch DDP")
            row[name] = f"{taken / torchs:.2f}" if taken and torchs else ""
        rows.append(row)
    cells = " | ".join(f"`{name}` = {{{name}}}" for name in workloads)
    yield markdown("= {strategy} | " + cells, rows)
    yield measured_on(results)


def _fastest_ms(workload: Json, strategy: str) -> float | None:
    steps = steps_of(workload)
    return min((steps[label] for label in STRATEGIES[strategy] if label in steps), default=None)


def pictured(results: Json) -> dict[str, dict[str, float]]:
    """Returns what the picture shows: ms by workload and strategy."""
    return {
        name: {
            strategy: round(taken, 1)
            for strategy in PICTURED
            if (taken := _fastest_ms(results["workloads"][name], strategy))
        }
        for name in PICTURED_WORKLOADS
        if name in results["workloads"]
    }


def picture_is_current(results: Json, path: Path) -> bool:
    """Returns whether the picture at `path` was drawn from these results."""
    return path.exists() and _figures(results) in path.read_text()


def draw(results: Json, path: Path) -> None:
    """Writes the picture at the head of README as SVG."""
    from measure.step_picture import draw_steps

    draw_steps(pictured(results), TITLE, measured_on(results), _figures(results), path)


def _figures(results: Json) -> str:
    return "figures: " + json.dumps(pictured(results)).replace('"', "'")


def met_often(workload: Json) -> Iterator[tuple[str, float]]:
    """Yields label and median step of the sides that ran in all rounds."""
    most = max(map(len, workload["runs"].values()))
    steps = steps_of(workload)
    for label, runs in workload["runs"].items():
        if len(runs) >= min(ROUNDS, most):
            yield label, steps[label]
