"""Writes the tables of bench_dp.py in Markdown."""

from __future__ import annotations

from harness import pages
from harness.pages import Blocks, Json, Rows
from readme_contests import RATIO, TARGET, contest_table, phases

KINDS = {
    "between_steps": "between steps",
    "after_backward": "after a backward",
    "peak": "at its fullest moment",
}
WHO = {"workload": "{workload}", "side": "{side}"}
OF_DDP = f"; of DDP {RATIO}, {TARGET}"
OVERHEAD = (
    "A call of `Linear(8, 8)` takes {added_us:.0f} us more through 2 replicas than directly; a "
    "wake-up of a thread takes {wake_up_us:.0f} us here. In proportion to 150 us, or three "
    f"wake-ups where that is more: {RATIO}, target {TARGET}."
)
DP_CONTESTS = contest_table(
    "`bench_dp.py`, 2 replicas or ranks x 1 thread, median step of fresh processes in paired "
    "rounds:",
    {
        "trireme DataParallel, 2 replicas": lambda row: f"{row['steps'][row['ours']]:.0f}",
        "measured against": "{theirs}",
    },
    beside={"trireme DDP, 2 ranks": "{steps[ddp, shared memory]:.0f}"},
)
PYTHON = pages.Table(
    "Time in Python, ms of a step under torch's profiler (that of the caller, and of the replicas' "
    "forwards with their waits for the interpreter):",
    {
        **WHO,
        "step": "{step_ms:.2f}",
        "Python, caller": "{caller_python_ms:.2f}",
        "Python, replicas": "{replica_python_ms:.2f}",
        "share": "{python_share:.1%}",
    },
    "python",
)


def _held(results: Json) -> Rows:
    beside = {
        (contest["workload"], contest["ours"], contest["kind"]): OF_DDP.format_map(contest)
        for contest in results.get("memory_contests", ())
    }
    for row in results.get("memory", ()):
        who = (row["workload"], row["side"])
        held = {kind: f"{row[kind]:.0f}{beside.get((*who, kind), '')}" for kind in KINDS}
        yield {**row, **held}


MEMORY = pages.Table(
    "Memory of a host, MiB (PSS of all processes), less what they held before the model was built; "
    "with the ratio to DDP, its quartiles and its target:",
    {**WHO, **{title: f"{{{kind}}}" for kind, title in KINDS.items()}},
    _held,
)


def dp_tables(results: Json) -> Blocks:
    """Yields every part of bench_dp.py that was run."""
    yield from DP_CONTESTS(results)
    yield from MEMORY(results)
    if "overhead" in results:
        yield OVERHEAD.format_map(results["overhead"])
    if copied := results.get("replicate"):
        most = f"{max(copied['copied_bytes'].values())}, target 0: {copied['verdict']}"
        yield f"Bytes copied per step to keep replicas up to date: {most}."
    yield from PYTHON(results)
    yield from phases(results)
