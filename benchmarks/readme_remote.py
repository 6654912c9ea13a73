"""Writes the tables of bench_remote.py, in Markdown."""

from __future__ import annotations

import statistics

from measure import pages
from measure.pages import Blocks, Json, Rows
from readme_steps import RATIO, TARGET

_SPREAD = "{median:.1f} ({least:.1f} to {most:.1f})"


def _medians(times: Json) -> dict[str, float]:
    return {side: statistics.median(found) for side, found in times.items()}


def _sizes(results: Json) -> Rows:
    for size, found in results.get("calls", {}).items():
        yield {"size": size, "us": _medians(found["times_us"]), "ratio": found["ratio_to_rpc"]}


CALLS = pages.Table(
    "`bench_remote.py`: a call from Python of a function that gives back its tensor, in us, two "
    "processes of one thread each, beside torch RPC (TensorPipe) in the same run; the same bytes "
    "there and back by `send` and `recv` of our backend; and one copy of them:",
    {
        "in and out": "{size}",
        "trireme": "{us[ours]:.1f}",
        "torch RPC": "{us[rpc]:.1f}",
        "send and recv": "{us[send and recv]:.1f}",
        "one copy": "{us[copy]:.1f}",
        "ratio to RPC (quartiles)": RATIO,
        "target": TARGET,
    },
    _sizes,
)


def _cpp_sides(results: Json) -> Rows:
    found = results.get("cpp")
    for side, times in found["times_us"].items() if found else ():
        verdict = found["verdicts"].get(side)
        target = f"{found['target_us']:g}: {verdict}" if verdict else ""
        yield {
            **{"side": side, "median": statistics.median(times), "target": target},
            **{"least": min(times), "most": max(times)},
        }


CPP = pages.Table(
    "From C++ to C++, which torch RPC has not, 4 bytes there and back:",
    {"": "{side}", "us (least to most)": _SPREAD, "target": "{target}"},
    _cpp_sides,
)


def _module(results: Json) -> Rows:
    if found := results.get("module"):
        yield {"us": _medians(found["times_us"]), "ratio": found["ratio_to_rpc"]}


MODULE = pages.Table(
    "Forward and backward of `Linear({module[width]}, {module[width]})` at another process, batch "
    "{module[batch]}, in us. Ours ends with `zero_grad()`, since the end of torch's context "
    "forgets the gradients, too; without it they add up. Locally it is the same layer in the "
    "caller's process:",
    {
        "`remote.Module`": "{us[ours]:.0f}",
        "added up": "{us[ours, added up]:.0f}",
        "`RemoteModule`, `dist_autograd`": "{us[rpc]:.0f}",
        "locally": "{us[local]:.0f}",
        "ratio to RPC (quartiles)": RATIO,
        "target": TARGET,
    },
    _module,
)


def _times_as_many(row: Json) -> str:
    slow, fast = (1 / quartile for quartile in reversed(row["ratio"]["quartiles"]))
    return f"{1 / row['ratio']['median']:.1f} ({slow:.1f} to {fast:.1f})"


def _batch(results: Json) -> Rows:
    if found := results.get("batch"):
        yield {"per_s": _medians(found["calls_per_s"]), "ratio": found["ratio_to_rpc"]}


BATCH = pages.Table(
    "Calls per second of {batch[callers]} callers, each with {batch[in_flight]} under way, at one "
    "callee that serves 4 at a time; these are more processes than the host has cores:",
    {
        "`batch=4`": "{per_s[ours]:.0f}",
        "`rpc.functions.async_execution`": "{per_s[rpc]:.0f}",
        "times as many (quartiles)": _times_as_many,
        "target": lambda row: f"{1 / row['ratio']['target']:.3g}: {row['ratio']['verdict']}",
    },
    _batch,
)


def _held(results: Json) -> Rows:
    found = results.get("memory")
    for row in found["rows"] if found else ():
        yield {**row, "target": found["target"]}


MEMORY = pages.Table(
    "Resident memory, freed memory given back, after {memory[calls]} calls and then after "
    "{memory[forwards]} forwards without a backward, beside that after a warm-up:",
    {
        "": "{process}, after {after}",
        "MiB": "{rss_mib:.1f}",
        "after warm-up": "{at_first_mib:.1f}",
        "growth": "{growth:+.2%}",
        "target": "{target:.0%}: {verdict}",
    },
    _held,
)
FAULTS = pages.Table(
    "A process is lost: seconds until the caller has raised, or until the owner has freed the "
    "object and the graph that the caller had there:",
    {
        "": "{kind}",
        "counted from": "{counted_from}",
        "median s": "{median_s:.3f}",
        "most s": "{most_s:.3f}",
        "target": "{target_s:g}: {verdict}",
        "what it says": lambda row: f"`{row['text']}`".replace("|", "/") if row["text"] else "",
    },
    "faults",
)


def remote_tables(results: Json) -> Blocks:
    """Yields every part that was run."""
    for part in (CALLS, CPP, MODULE, BATCH, MEMORY, FAULTS):
        yield from part(results)
    yield pages.measured_on(results)
