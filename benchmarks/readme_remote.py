"""Declares the tables of bench_remote.py."""

from __future__ import annotations

import statistics

from readme_tables import Blocks, Json, Table, every

CALLS = Table(
    "calls/{size}",
    "`bench_remote.py`: a call from Python of a function that gives back its tensor, in us, two "
    "processes of one thread each, beside torch RPC (TensorPipe) in the same run; the same bytes "
    "there and back by `send` and `recv` of our backend; and one copy of them:",
    "in and out = {size} | trireme = {times_us[ours]:.1f} | torch RPC = {times_us[rpc]:.1f} | "
    "send and recv = {times_us[send and recv]:.1f} | one copy = {times_us[copy]:.1f} | "
    "ratio to RPC (quartiles) = {ratio_to_rpc:ratio}",
)
CPP = Table(
    "cpp/times_us/{side}",
    "From C++ to C++, which torch RPC has not, 4 bytes there and back:",
    "= {side} | us (least to most) = {in_side:range}",
)
MODULE = Table(
    "module",
    "Forward and backward of `Linear({module[width]}, {module[width]})` at another process, batch "
    "{module[batch]}, in us. Ours ends with `zero_grad()`, since the end of torch's context "
    "forgets the gradients, too; without it they add up. Locally it is the same layer in the "
    "caller's process:",
    "`remote.Module` = {times_us[ours]:.0f} | added up = {times_us[ours, added up]:.0f} | "
    "`RemoteModule`, `dist_autograd` = {times_us[rpc]:.0f} | locally = {times_us[local]:.0f} | "
    "ratio to RPC (quartiles) = {ratio_to_rpc:ratio}",
)
BATCH = Table(
    "batch",
    "Calls per second of {batch[callers]} callers, each with {batch[in_flight]} under way, at one "
    "callee that serves 4 at a time; these are more processes than the host has cores:",
    "`batch=4` = {calls_per_s[ours]:.0f} | "
    "`rpc.functions.async_execution` = {calls_per_s[rpc]:.0f} | "
    "times as many (quartiles) = {ratio_to_rpc:times}",
)
MEMORY = Table(
    "memory/rows",
    "Resident memory, freed memory given back, after {memory[calls]} calls and then after "
    "{memory[forwards]} forwards without a backward, beside that after a warm-up:",
    "= {process}, after {after} | MiB = {rss_mib:.1f} | after warm-up = {at_first_mib:.1f} | "
    "growth = {growth:+.2%}",
)
FAULTS = Table(
    "faults",
    "A process is lost: seconds until the caller has raised, or until the owner has freed the "
    "object and the graph that the caller had there:",
    "= {kind} | counted from = {counted_from} | median s = {median_s:.3f} | "
    "most s = {most_s:.3f} | what it says = {says}",
    each=lambda row: {**row, "says": row["text"] and f"`{row['text']}`".replace("|", "/")},
)


def added_by_distance(results: Json) -> Blocks:
    """Yields what being remote adds to a layer, here and in torch RPC."""
    if found := results.get("module"):
        times = found["times_us"]
        ours, rpc, local = (statistics.median(times[side]) for side in ("ours", "rpc", "local"))
        yield (
            f"The layer alone takes {local / rpc:.2f} of RPC's time. Being remote adds "
            f"{(ours - local) / 1000:.1f} ms to it here and {(rpc - local) / 1000:.1f} ms in RPC, "
            f"a ratio of {(ours - local) / (rpc - local):.2f}."
        )


remote_tables = every(CALLS, CPP, MODULE, BATCH, MEMORY, FAULTS, added_by_distance)
