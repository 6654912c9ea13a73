"""Writes the results into README.md and docs/ from the committed JSON: no figure is typed by hand.

python benchmarks/readme_results.py          rewrite the pages
python benchmarks/readme_results.py --check  exit 1 if one of them is not what the JSON says
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness import pages
from harness.pages import Blocks, Columns, Json, Rows
from readme_checkpoint import checkpoint_tables
from readme_contests import HOST_MEMORY, OUTCOME, RATIO, contest_table, phases, step_of
from readme_dp import DP_CONTESTS, dp_tables
from readme_fsdp import (
    FSDP_AGAINST_TORCH,
    fsdp_tables,
    gathered_tables,
    hosts_tables,
    strategy_tables,
)
from readme_summary import summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- results: written by benchmarks/readme_results.py from benchmarks/results/*.json -->\n"
END = "<!-- results end -->\n"


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args(command_line)
    stale = 0
    for name in PAGES:
        page = ROOT / name
        before = page.read_text()
        head, rest = before.split(BEGIN)
        _, tail = rest.split(END)
        after = head + BEGIN + written(name) + END + tail
        if not arguments.check:
            page.write_text(after)
        elif before != after:
            stale = 1
            print(
                f"[readme] got figures in {name} that are not those of benchmarks/results. "
                "Run benchmarks/readme_results.py."
            )
    return stale


def written(name: str) -> str:
    """Returns what a page says of the runs that are committed."""
    found = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    found[ALL] = dict(found)
    parts = (part(found[file]) for file, part in PAGES[name] if file in found)
    blocks = list(filter(None, itertools.chain.from_iterable(parts)))
    return "\n" + "\n\n".join(blocks or ["No run is committed yet."]) + "\n\n"


def _exposed(run: Json) -> str:
    return f"{run['exposed_comm_ms'] / run['step_ms']['median']:.1%}" if run["world"] > 1 else ""


COMPARED = pages.Table(
    "`make compare`, GPT on text, same batches everywhere:",
    {
        "strategy": "{strategy}",
        "ranks": "{world}",
        "step ms (p10 to p90)": "{step_ms[median]:.0f} ({step_ms[p10]:.0f} to {step_ms[p90]:.0f})",
        "samples/s": "{samples_per_s:.1f}",
        "exposed comm": _exposed,
        "peak MiB/rank": "{peak_rss_mib_per_rank:.0f}",
        "final loss": "{final_loss:.4f}",
    },
    "runs",
    foot=[pages.measured_on],
)


def _bytes_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _transfers(results: Json, sizes_shown: Sequence[int] = ()) -> Rows:
    for operation, sizes in results["operations"].items():
        for size, found in ((int(size), found) for size, found in sizes.items()):
            if size in sizes_shown or not sizes_shown:
                ratio = found["ratio_to_gloo"]
                medians = {side: statistics.median(us) for side, us in found["times_us"].items()}
                faster = [1 / ratio["median"], *(1 / quartile for quartile in ratio["quartiles"])]
                target = 1 / ratio["target"] if ratio["target"] < 1 else None
                what = {"operation": operation, "bytes": _bytes_text(size)}
                yield {**found, **what, "us": medians, "faster": faster, "target": target}


COLLECTIVES = pages.Table(
    "`bench_collectives.py`, {ranks} ranks x 1 thread, fp32, through torch.distributed from "
    "Python:",
    {
        "collective": "{operation}",
        "bytes": "{bytes}",
        "trireme, us": "{us[ours]:.1f}",
        "Gloo, us": "{us[gloo]:.1f}",
        "times faster (quartiles)": "{faster[0]:.1f} ({faster[2]:.1f} to {faster[1]:.1f})",
        "target": pages.where("target", "{target:.0f}: {ratio_to_gloo[verdict]}"),
        "of a copy's time": "{ratio_to_copy[median]:.2f}",
    },
    _transfers,
    foot=[pages.measured_on],
)
SHORT_LIST = replace(COLLECTIVES, rows=partial(_transfers, sizes_shown=(64 << 10, 25 << 20)))
FAULT_TIMES = pages.Table(
    "`bench_faults.py`, {machine[cores]} cores, all-reduce of 25 MiB from Python, {tries} tries "
    "each; until the last of the other ranks has raised:",
    {
        "the last rank is": "{kind}",
        "ranks": "{ranks}",
        "median ms": "{median_ms:.1f}",
        "most ms": "{max_ms:.1f}",
    },
    "cases",
    foot=[pages.measured_on],
)


def _of_in_place(row: Json) -> str:
    ratio = row.get("in_place_ratio")
    return f"{1 / ratio['median']:.0%}: {ratio['verdict']}" if ratio else ""


OPTIMIZERS: Columns = {
    "": "{name}",
    "step, ms": "{step_ms:.2f}",
    "torch's fused, ms": "{torch_step_ms:.2f}",
    "ratio (quartiles)": RATIO,
    "of an in-place pass, target 85 %": _of_in_place,
}


def optimizer_tables(results: Json) -> Blocks:
    """Yields steps beside torch's fused ones and beside an in-place pass over as many bytes."""
    for device, steps in results["devices"].items():
        rows = ({**row, "name": name, "ratio": row["time_ratio"]} for name, row in steps.items())
        yield f"`bench_optimizers.py`, {device}:"
        yield pages.markdown(OPTIMIZERS, rows)
    yield pages.measured_on(results)


REDUCER = pages.where(
    "reducer_overhead",
    "What the reducer adds to a step of 1,000 parameters of 64 elements, over torch's fake process "
    "group: {reducer_overhead[added_ratio][median]:.2f} of what torch's adds (target "
    "{reducer_overhead[added_ratio][target]:g}: {reducer_overhead[added_ratio][verdict]}).",
)


def ddp_table(ours: str, over: str) -> pages.Table:
    """Returns torch's DDP against the side of that name, and what gradients went over."""
    return contest_table(
        f"`bench_ddp.py`, 2 ranks x 1 thread, {over}, median step of fresh processes in pairs:",
        {"torch DDP, its best": step_of("theirs"), "trireme DDP": f"{{steps[{ours}]:.0f}}"},
        outcome={**OUTCOME, "memory ratio": "{memory[ratio]:.3f}"},
        foot=[REDUCER, pages.measured_on],
    )


ZERO = contest_table(
    "`bench_zero.py`, 2 ranks x 1 thread, ours through shared memory, torch's over Gloo, median "
    "step of fresh processes in pairs:",
    {
        "torch ZeRO-1, its best": step_of("torch_zero_best"),
        "measured against": step_of("theirs"),
        "trireme ZeRO": step_of("ours"),
    },
)


def zero_tables(results: Json) -> Blocks:
    """Yields every side of bench_zero.py, and what a host holds."""
    yield from ZERO(results)
    yield from phases(results)
    yield from HOST_MEMORY(results)


ALL = "all"  # takes every result, by the name of its file
Part = tuple[str, Callable[[Json], Blocks]]  # is left out where no such run is committed
DDP = (
    ("ddp_shm", ddp_table("ddp, shared memory", "ours through shared memory, torch's over Gloo")),
    ("ddp", ddp_table("ddp", "both over Gloo")),
)
PAGES: Mapping[str, Sequence[Part]] = {
    "README.md": (
        (ALL, summary),
        ("compare_gpt", COMPARED),
        ("collectives", SHORT_LIST),
        DDP[0],
        ("zero", ZERO),
        ("fsdp", FSDP_AGAINST_TORCH),
        ("dp", DP_CONTESTS),
    ),
    "docs/shared_memory.md": (
        ("faults", FAULT_TIMES),
        ("collectives", COLLECTIVES),
        ("collectives_4_ranks", COLLECTIVES),
    ),
    "docs/ddp.md": DDP,
    "docs/zero.md": (("zero", zero_tables),),
    "docs/fsdp.md": (("fsdp", fsdp_tables), ("fsdp_gathered", gathered_tables)),
    "docs/data_parallel.md": (("dp", dp_tables),),
    "docs/strategies.md": ((ALL, strategy_tables),),
    "docs/optimizers.md": (("optimizers", optimizer_tables),),
    "docs/checkpoint.md": (("checkpoint", checkpoint_tables),),
    "docs/multi_host.md": (("hosts", hosts_tables),),
}


if __name__ == "__main__":
    sys.exit(main())
