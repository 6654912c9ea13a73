"""Declares the tables of memory, overheads, collectives, faults, optimizers and several hosts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from readme_tables import Blocks, Json, Rows, Table, every, found, measured_on, text


def memory_rows(results: Json) -> Rows:
    """Yields what hosts held."""
    yield from (row for _, row in found(results, "workloads/{workload}/memory"))


def _left_by_torch(results: Json) -> str:
    shown = "{left_by_torch:.0f} MiB in {ranks} ranks of {workload}"
    each = ", ".join(filter(None, (text(shown, row) for row in memory_rows(results))))
    return each and f"Ranks that never talk hold more than parameters and moments, too: {each}."


# measure/memory_report.py measured the rows of this.
HOST_MEMORY = Table(
    memory_rows,
    "`bench_memory.py`, MiB that all ranks of a host hold together (PSS), less what they held "
    "before the model was built; model states are parameters, gradients and moments:",
    "workload = `{workload}` | side = {side} | ranks = {ranks} | "
    "between steps = {between_steps:.0f} | bytes per parameter = {per_parameter:.1f} | "
    "after a backward = {after_backward:.0f} | at most = {peak:.0f} | "
    "model states = {model_states:.1f} | as estimated = {estimated:.1f}",
    foot=[_left_by_torch, measured_on],
    each=lambda row: {**row, "per_parameter": row["between_steps"] * 2**20 / row["numel"]},
)


def _widest(results: Json) -> Rows:
    for _, row in found(results, "limit/sides/{label}"):
        width = row["width"]
        millions = 16 * (width + 1) * width / 1e6 if width else None
        peak = row["peaks"].get(str(width))
        yield {**row, "width": width or "none", "millions": millions, "peak": peak}


LIMIT = Table(
    _widest,
    "The widest `mlp` (in steps of {limit[step]}) that 2 ranks build and train within "
    "{limit[limit_mib]:.0f} MiB of the host, beyond what they held before:",
    "= {label} | width = {width} | million parameters = {millions:.0f} | "
    "MiB at its fullest moment = {peak:.0f}",
    foot=[measured_on],
)


def added_by(part: str, what: str, *why: str) -> Table:
    """Returns what writes one part of bench_overheads.py: a table, its ratios, and why."""

    def outcome(results: Json) -> str:
        shown = "; {ours} / {theirs}: {ratio:ratio}"
        ratios = "".join(text(shown, row) for _, row in found(results, f"{part}/contests"))
        return " ".join([f"What is added to a step{ratios}.", *why])

    def rows(results: Json) -> Rows:
        for label, runs in results.get(part, {"runs": {}})["runs"].items():
            added = [run["wrapped_ms"] - run["bare_ms"] for run in runs]
            yield {"label": label, "runs": runs, "added": added}

    return Table(
        rows,
        f"`bench_overheads.py`, {what}, ms of a step:",
        "= {label} | bare = {runs[bare_ms]:.2f} | wrapped = {runs[wrapped_ms]:.2f} | "
        "added = {added:.2f}",
        foot=[outcome, measured_on],
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
PYTHON = Table(
    "python",
    "`bench_overheads.py`, time in Python, ms of a step under torch's profiler: that of the "
    "caller, and of the forwards of replicas with their waits for the interpreter:",
    "workload = `{workload}` | side = {side} | step = {step_ms:.2f} | "
    "Python, caller = {caller_python_ms:.2f} | Python, replicas = {replica_python_ms:.2f} | "
    "share = {python_share:.1%} | bytes copied for replicas = {most_copied}",
    foot=[measured_on],
)


def replica_overheads(results: Json) -> Blocks:
    """Yields what DataParallel costs."""
    yield text(
        "A call of `Linear(8, 8)` takes {replicas[added_us]:.0f} us more through 2 replicas than "
        "directly; a wake-up of a thread takes {replicas[wake_up_us]:.0f} us here.",
        results,
    )
    yield from PYTHON(results)


def hosts_tables(results: Json) -> Blocks:
    """Yields what crosses the cable between two hosts."""
    yield (
        f"`bench_hosts.py`, two namespaces of one machine of {results['machine']['cores']} cores, "
        "bytes as their interfaces count them, medians of fresh processes in rounds (four ranks on "
        "those cores and a cable as fast as memory: step times say what sharding costs the CPU):"
    )
    for name, workload in results["workloads"].items():
        yield from Table(
            partial(_sent, workload),
            "",
            f"`{name}`, 2 x 2 ranks = {{label}} | host 0 sends MB per step = {{sent[0]:.1f}} | "
            "host 1 = {sent[1]:.1f} | fsdp / this = {ratio:.2f} | step ms = {runs[step_ms]:.0f}",
        )(results)
    yield measured_on(results)


def _sent(workload: Json, _: Json) -> Rows:
    for label, runs in workload["runs"].items():
        sent = [statistics.median(run["sent_mb"][host] for run in runs) for host in (0, 1)]
        ratio = workload["bytes_ratios"].get(label)
        yield {"label": label, "runs": runs, "sent": sent, "ratio": ratio}


def bytes_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _transfers(results: Json, sizes_shown: Sequence[int] = ()) -> Rows:
    for _, row in found(results, "operations/{operation}/{bytes}"):
        size = int(row["bytes"])
        if size in sizes_shown or not sizes_shown:
            yield {**row, "bytes": bytes_text(size)}


COLLECTIVES = Table(
    _transfers,
    "`bench_collectives.py`, {ranks} ranks x 1 thread, fp32, through torch.distributed from "
    "Python:",
    "collective = {operation} | bytes = {bytes} | trireme, us = {times_us[ours]:.1f} | "
    "Gloo, us = {times_us[gloo]:.1f} | times faster (quartiles) = {ratio_to_gloo:times} | "
    "of a copy's time = {ratio_to_copy:.2f}",
    foot=[measured_on],
)
SHORT_LIST = replace(COLLECTIVES, rows=partial(_transfers, sizes_shown=(64 << 10, 25 << 20)))
FAULT_TIMES = Table(
    "cases",
    "`bench_faults.py`, {machine[cores]} cores, all-reduce of 25 MiB from Python, {tries} tries "
    "each; until the last of the other ranks has raised:",
    "the last rank is = {kind} | ranks = {ranks} | median ms = {median_ms:.1f} | "
    "most ms = {max_ms:.1f}",
)
PS_FAULT_TIMES = Table(
    "parameter_server",
    "And while the others wait in a pull of a parameter server, 4 MiB; until the last of them has "
    'raised, or has pulled without the worker that it left behind (`on_worker_loss="continue"`):',
    "the last worker is = {kind} | ranks = {ranks} | counted from = {counted_from} | "
    "median ms = {median_ms:.1f} | most ms = {max_ms:.1f}",
)
fault_tables = every(FAULT_TIMES, PS_FAULT_TIMES)


def optimizer_tables(results: Json) -> Blocks:
    """Yields steps beside torch's fused ones and beside an in-place pass over as many bytes."""
    for device, steps in results["devices"].items():
        yield from Table(
            "{name}",
            f"`bench_optimizers.py`, {device}:",
            "= {name} | step, ms = {step_ms:.2f} | torch's fused, ms = {torch_step_ms:.2f} | "
            "ratio (quartiles) = {time_ratio:ratio} | of an in-place pass = {in_place_ratio:1/.0%}",
        )(steps)
    yield measured_on(results)
