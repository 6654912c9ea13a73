"""Writes what bench_memory.py, bench_overheads.py and bench_hosts.py measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from measure import pages
from measure.pages import Blocks, Columns, Json, Rows
from readme_steps import RATIO, TARGET


def memory_rows(results: Json, side: str = "") -> Rows:
    """Yields what hosts held under sides whose label begins so."""
    for workload in results.get("workloads", {}).values():
        yield from (row for row in workload["memory"] if row["side"].startswith(side))


def _left_by_torch(results: Json) -> str:
    left = pages.where("left_by_torch", "{left_by_torch:.0f} MiB in {ranks} ranks of {workload}")
    each = ", ".join(filter(None, map(left, memory_rows(results))))
    return each and f"Ranks that never talk hold more than parameters and moments, too: {each}."


# measure/memory_report.py measured the rows of this.
HOST_MEMORY = pages.Table(
    "`bench_memory.py`, MiB that all ranks of a host hold together (PSS), less what they held "
    "before the model was built; model states are parameters, gradients and moments:",
    {
        "workload": "`{workload}`",
        "side": "{side}",
        "ranks": "{ranks}",
        "between steps": "{between_steps:.0f}",
        "bytes per parameter": lambda row: f"{bytes_per_parameter(row):.1f}",
        "after a backward": "{after_backward:.0f}",
        "at most": pages.where("peak", "{peak:.0f}"),
        "target between steps": pages.where("limit", "{limit:.0f}: {verdict}"),
        "model states": "{model_states:.1f}",
        "as estimated": pages.where("estimated", "{estimated:.1f}"),
    },
    memory_rows,
    foot=[_left_by_torch, pages.measured_on],
)


def bytes_per_parameter(row: Json) -> float:
    """Returns what a host holds between steps for each parameter."""
    return float(row["between_steps"] * 2**20 / row["numel"])


def _widest(results: Json) -> Rows:
    for label, fitting in results.get("limit", {}).get("sides", {}).items():
        width = fitting["width"]
        millions = 16 * (width + 1) * width / 1e6 if width else None
        peak = fitting["peaks"].get(str(width))
        yield {"label": label, "width": width or "none", "millions": millions, "peak": peak}


LIMIT = pages.Table(
    "The widest `mlp` (in steps of {limit[step]}) that 2 ranks build and train within "
    "{limit[limit_mib]:.0f} MiB of the host, beyond what they held before:",
    {
        "": "{label}",
        "width": "{width}",
        "million parameters": pages.where("millions", "{millions:.0f}"),
        "MiB at its fullest moment": pages.where("peak", "{peak:.0f}"),
    },
    _widest,
    foot=[pages.measured_on],
)

ADDED = "; {ours} / {theirs}: " + f"{RATIO}, target {TARGET}"


def added_by(part: str, what: str, *why: str) -> Callable[[Json], Blocks]:
    """Returns what writes one part of bench_overheads.py: a table, its contests, and why."""

    def rows(results: Json) -> Iterator[Json]:
        for label, runs in results.get(part, {}).get("runs", {}).items():
            added = [{**run, "added_ms": run["wrapped_ms"] - run["bare_ms"]} for run in runs]
            yield from pages.medians({label: added}, ("bare_ms", "wrapped_ms", "added_ms"))

    def outcome(results: Json) -> str:
        ratios = map(ADDED.format_map, results[part]["contests"])
        return " ".join([f"What is added to a step{''.join(ratios)}.", *why])

    return pages.Table(
        f"`bench_overheads.py`, {what}, ms of a step:",
        {
            "": "{label}",
            "bare": "{bare_ms:.2f}",
            "wrapped": "{wrapped_ms:.2f}",
            "added": "{added_ms:.2f}",
        },
        rows,
        foot=[outcome, pages.measured_on],
    )


REDUCER = added_by(
    "reducer",
    "DDP of 1,000 parameters of 64 elements over torch's fake group",
    "What we add to a parameter is a hook, a copy of its gradient, and checks of what ranks have "
    "agreed about. The tensors over a bucket become .grad again in every step. torch's class keeps "
    "tensors only where gradients are views, and copies many at once only by `batched_grad_copy`.",
)
UNITS = added_by("units", "fully_shard of 64 units of 4 small parameters")
GATHERED_UNITS = added_by("gathered-units", "the same where both gather, over torch's fake group")

CALL = (
    "A call of `Linear(8, 8)` takes {added_us:.0f} us more through 2 replicas than directly; a "
    "wake-up of a thread takes {wake_up_us:.0f} us here. In proportion to 150 us, or three "
    f"wake-ups where that is more: {RATIO}, target {TARGET}."
)
PYTHON = pages.Table(
    "`bench_overheads.py`, time in Python, ms of a step under torch's profiler: that of the "
    "caller, and of the forwards of replicas with their waits for the interpreter:",
    {
        "workload": "`{workload}`",
        "side": "{side}",
        "step": "{step_ms:.2f}",
        "Python, caller": "{caller_python_ms:.2f}",
        "Python, replicas": "{replica_python_ms:.2f}",
        "share": "{python_share:.1%}",
        "bytes copied for replicas": "{most_copied}",
    },
    "python",
    foot=[pages.measured_on],
)


def replica_overheads(results: Json) -> Blocks:
    """Yields what DataParallel costs."""
    if "replicas" in results:
        yield CALL.format_map(results["replicas"])
    yield from PYTHON(results)


SENT: Columns = {
    "host 0 sends MB per step": "{sent_mb[0]:.1f}",
    "host 1": "{sent_mb[1]:.1f}",
    "fsdp / this": pages.where("ratio", "{ratio[median]:.2f}"),
    "target": pages.where("ratio", TARGET),
    "step ms": "{step_ms:.0f}",
}


def hosts_tables(results: Json) -> Blocks:
    """Yields what crosses the cable between two hosts."""
    yield (
        f"`bench_hosts.py`, two namespaces of one machine of {results['machine']['cores']} cores, "
        "bytes as their interfaces count them, medians of fresh processes in rounds (four ranks on "
        "those cores and a cable as fast as memory: step times say what sharding costs the CPU):"
    )
    for name, workload in results["workloads"].items():
        yield pages.markdown({f"`{name}`, 2 x 2 ranks": "{label}", **SENT}, _sent(workload))
    yield pages.measured_on(results)


def _sent(workload: Json) -> Rows:
    for label, runs in workload["runs"].items():
        yield {
            "label": label,
            "sent_mb": [statistics.median(run["sent_mb"][host] for run in runs) for host in (0, 1)],
            "ratio": workload["bytes_ratios"].get(label),
            "step_ms": pages.median_of(runs, "step_ms"),
        }
