"""The tables of bench_dp.py in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.pages import markdown, measured_on, median_of, phases, ratio_cells

Results = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

KINDS = {
    "between_steps": "between steps",
    "after_backward": "after a backward",
    "peak": "at its fullest moment",
}


def dp_section(results: Results) -> str:
    """Who is measured against whom."""
    rows = []
    for name, workload in results["workloads"].items():
        runs = workload["runs"]
        (contest,) = workload["contests"]
        steps = [
            f"{median_of(runs[label], 'step_ms'):.0f}"
            for label in ("1 process", "ddp, shared memory", contest["ours"])
        ]
        rows.append([name, *steps, contest["theirs"], *ratio_cells(contest["ratio"])])
    header = [
        "workload",
        "1 process x 2 threads, ms",
        "trireme DDP, 2 ranks",
        "trireme DataParallel, 2 replicas",
        "measured against",
        "ratio (quartiles)",
        "target",
    ]
    title = (
        "`bench_dp.py`, 2 replicas or ranks x 1 thread, median step of fresh processes in paired "
        "rounds:\n\n"
    )
    return title + markdown(header, rows) + measured_on(results)


def dp_tables(results: Results) -> str:
    """Every part of bench_dp.py that was run."""
    parts = []
    if results["workloads"]:
        parts.append(dp_section(results))
    if "memory" in results:
        parts.append(_memory(results["memory"], results["memory_contests"]))
    if "overhead" in results:
        parts.append(_overhead(results["overhead"]))
    if "replicate" in results:
        parts.append(_replicate(results["replicate"]))
    if "python" in results:
        parts.append(_python(results["python"]))
    for name, workload in results["workloads"].items():
        parts.append(f"`{name}`:\n\n" + phases(workload["runs"]))
    return "\n" + "\n".join(parts) + "\n"


def _memory(held: Rows, contests: Rows) -> str:
    rows = [[row["workload"], row["side"], *(f"{row[kind]:.0f}" for kind in KINDS)] for row in held]
    for contest in contests:
        ratio, target = ratio_cells(contest["ratio"])
        same = [r for r in rows if r[:2] == [contest["workload"], contest["ours"]]]
        for row in same:
            place = 2 + list(KINDS).index(contest["kind"])
            row[place] += f"; of DDP {ratio}, {target}"
    title = (
        "Memory of a host, MiB (PSS of all processes), less what they held before the model was "
        "built; with the ratio to DDP, its quartiles and its target:\n\n"
    )
    return title + markdown(["workload", "side", *KINDS.values()], rows)


def _overhead(found: Mapping[str, Any]) -> str:
    ratio, target = ratio_cells(found["ratio"])
    return (
        f"A call of `Linear(8, 8)` takes {found['added_us']:.0f} us more through 2 replicas than "
        f"directly; a wake-up of a thread takes {found['wake_up_us']:.0f} us here. In proportion "
        f"to 150 us, or three wake-ups where that is more: {ratio}, target {target}.\n"
    )


def _replicate(found: Mapping[str, Any]) -> str:
    most = max(found["copied_bytes"].values())
    verdict = found["verdict"]
    return f"Bytes copied per step to keep replicas up to date: {most}, target 0: {verdict}.\n"


def _python(found: Rows) -> str:
    rows = [
        [
            row["workload"],
            row["side"],
            *(f"{row[name]:.2f}" for name in ("step_ms", "caller_python_ms", "replica_python_ms")),
            f"{row['python_share']:.1%}",
        ]
        for row in found
    ]
    header = ["workload", "side", "step", "Python, caller", "Python, replicas", "share"]
    return (
        "Time in Python, ms of a step under torch's profiler (that of the caller, and of the "
        "replicas' forwards with their waits for the interpreter):\n\n" + markdown(header, rows)
    )
