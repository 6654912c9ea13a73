"""Writes what several benchmarks have: who won, where the time goes, what a host holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from harness import pages
from harness.pages import Blocks, Columns, Json, Rows

RATIO = "{ratio[median]:.3f} ({ratio[quartiles][0]:.3f} to {ratio[quartiles][1]:.3f})"
TARGET = "{ratio[target]:g}: {ratio[verdict]}"
OUTCOME = {"ratio (quartiles)": RATIO, "target": TARGET}
NO_SYNC = {"2 ranks, no sync": "{steps[2 ranks, no sync]:.0f}"}
PHASES_MS = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")


def contest_table(
    title: str,
    sides: Columns,
    beside: Columns = NO_SYNC,
    outcome: Columns = OUTCOME,
    against: str = "",
    foot: Sequence[Callable[[Json], str]] = (pages.measured_on,),
) -> pages.Table:
    """Returns the table of who won against those whose name begins so."""
    alone = {"workload": "{workload}", "1 process x 2 threads, ms": "{steps[1 process]:.0f}"}
    columns = {**alone, **beside, **sides, **outcome}
    return pages.Table(title, columns, partial(contests, against=against), foot)


def contests(results: Json, against: str = "") -> Rows:
    """Yields who met whom on which workload, and the steps of all sides."""
    for name, workload in results.get("workloads", {}).items():
        for contest in workload.get("contests") or _only_contest(workload):
            if contest["theirs"].startswith(against):
                yield {**workload, **contest, "workload": name, "steps": pages.steps_of(workload)}


def _only_contest(workload: Json) -> Rows:
    """Yields the contest of bench_ddp.py, which names no sides."""
    if "step_ratio" in workload:
        yield {"ours": "ddp", "theirs": workload["torch_best"], "ratio": workload["step_ratio"]}


def step_of(side: str) -> Callable[[Json], str]:
    """Returns a column of contests that shows the step and the label of a side."""
    return lambda contest: f"{contest['steps'][contest[side]]:.0f} ({contest[side]})"


def phases(results: Json) -> Blocks:
    """Yields where the time of every side's steps goes, a table per workload."""
    columns = {phase.removesuffix("_ms"): f"{{{phase}:.1f}}" for phase in PHASES_MS}
    for name, workload in results["workloads"].items():
        yield f"`{name}`:"
        rows = pages.medians(workload["runs"], PHASES_MS)
        yield pages.markdown({"median of fresh processes, ms": "{label}", **columns}, rows)


def _left_by_torch(results: Json) -> str:
    left = pages.where("left_by_torch", "{left_by_torch:.0f} MiB in {ranks} ranks of {workload}")
    each = ", ".join(filter(None, map(left, results["memory"])))
    return each and f"Ranks that never talk hold more than parameters and moments, too: {each}."


# harness/memory_report.py measured the rows of this.
HOST_MEMORY = pages.Table(
    "Memory of a host, all ranks together (PSS), less what they held before the model was built; "
    "after a backward with what the allocator keeps of activations; model states are gradients, "
    "parameters and moments then:",
    {
        "workload": "{workload}",
        "side": "{side}",
        "ranks": "{ranks}",
        "MiB between steps": "{between_steps:.0f}",
        "bytes per parameter": pages.bytes_per_parameter,
        "MiB after a backward": "{after_backward:.0f}",
        "target between steps": pages.where("limit", "{limit:.0f}: {verdict}"),
        "model states": "{model_states:.1f}",
        "as estimated": "{estimated:.1f}",
    },
    "memory",
    foot=[_left_by_torch],
)
