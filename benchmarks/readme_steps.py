"""Writes what bench_steps.py measured: who won, where the time of a step goes, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path

from measure import pages
from measure.pages import Blocks, Columns, Json, Rows

ROUNDS = 7  # sides that met others have as many runs
RATIO = "{ratio[median]:.3f} ({ratio[quartiles][0]:.3f} to {ratio[quartiles][1]:.3f})"
TARGET = "{ratio[target]:g}: {ratio[verdict]}"
PHASES_MS = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")

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


def contests(results: Json, ours: str = "", theirs: str = "") -> Rows:
    """Yields who met whom on which workload, with the steps of all sides.

    `ours`, `theirs`: how the labels begin.
    """
    for name, workload in results.get("workloads", {}).items():
        for contest in workload["contests"]:
            if contest["ours"].startswith(ours) and contest["theirs"].startswith(theirs):
                yield {**contest, "workload": name, "steps": pages.steps_of(workload)}


def _step_of(side: str) -> Callable[[Json], str]:
    return lambda contest: f"{contest['steps'][contest[side]]:.0f} ({contest[side]})"


def contest_table(ours: str = "") -> pages.Table:
    """Returns the contests of sides whose label begins so."""
    columns: Columns = {
        "workload": "`{workload}`",
        "1 process x 2 threads": "{steps[1 process]:.0f}",
        "2 ranks, no sync": "{steps[no sync]:.0f}",
        "measured against": _step_of("theirs"),
        "trireme": _step_of("ours"),
        "ratio (quartiles)": RATIO,
        "target": TARGET,
    }
    title = "`bench_steps.py`, medians of a step in ms, fresh processes in paired rounds:"
    rows = partial(contests, ours=ours)
    return pages.Table(title, columns, rows, foot=[pages.measured_on])


def _peaks(results: Json) -> str:
    found = [
        f"{workload['memory']['ratio']:.2f} (`{name}`)"
        for name, workload in results["workloads"].items()
        if "memory" in workload
    ]
    return f"Peak memory of a rank, ddp / torch-ddp + view: {', '.join(found)}." if found else ""


DDP = contest_table("ddp")


def ddp_tables(results: Json) -> Blocks:
    """Yields the contests of DDP, and its peak memory beside torch's."""
    yield from DDP(results)
    yield _peaks(results)


def phases(results: Json) -> Blocks:
    """Yields where the time of every side's steps goes, a table per workload."""
    columns = {phase.removesuffix("_ms"): f"{{{phase}:.1f}}" for phase in PHASES_MS}
    for name, workload in results["workloads"].items():
        yield f"`{name}`:"
        rows = [
            {**row, "runs": len(workload["runs"][row["label"]])}
            for row in pages.medians(workload["runs"], PHASES_MS)
        ]
        yield pages.markdown({"ms": "{label}", **columns, "runs": "{runs}"}, rows)


def strategy_table(results: Json) -> Blocks:
    """Yields all strategies side by side, in parts of the time that torch's DDP takes."""
    yield "Step time, 2 ranks x 1 thread, the fastest of torch's DDP = 1:"
    cases = list(results["workloads"])
    rows = []
    for strategy in STRATEGIES:
        row = {"": strategy}
        for name, workload in results["workloads"].items():
            taken = _fastest_ms(workload, strategy)
            torchs = _fastest_ms(workload, "torch DDP")
            row[f"`{name}`"] = f"{taken / torchs:.2f}" if taken and torchs else ""
        rows.append(row)
    titles = ("", *(f"`{name}`" for name in cases))
    yield pages.markdown({title: itemgetter(title) for title in titles}, rows)
    yield pages.measured_on(results)


def _fastest_ms(workload: Json, strategy: str) -> float | None:
    steps = pages.steps_of(workload)
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

    draw_steps(pictured(results), pages.measured_on(results), _figures(results), path)


def _figures(results: Json) -> str:
    return "figures: " + json.dumps(pictured(results)).replace('"', "'")


def met_often(workload: Json) -> Iterator[tuple[str, float]]:
    """Yields label and median step of the sides that ran in all rounds."""
    most = max(map(len, workload["runs"].values()))
    steps = pages.steps_of(workload)
    for label, runs in workload["runs"].items():
        if len(runs) >= min(ROUNDS, most):
            yield label, steps[label]
