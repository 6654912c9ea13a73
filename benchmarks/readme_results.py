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

from measure import pages
from measure.pages import Blocks, Columns, Json, Rows
from readme_activation import activation_tables
from readme_bounds import (
    added_by_averaging,
    added_per_gradient,
    idle_ranks,
    pipeline_bounds,
    remote_bounds,
)
from readme_checkpoint import checkpoint_tables
from readme_costs import (
    GATHERED_UNITS,
    HOST_MEMORY,
    LIMIT,
    REDUCER,
    UNITS,
    hosts_tables,
    replica_overheads,
)
from readme_gpu import gpu_tables
from readme_pipeline import pipeline_tables
from readme_ps import ps_tables
from readme_remote import remote_tables
from readme_steps import (
    RATIO,
    contest_table,
    ddp_tables,
    draw,
    phases,
    picture_is_current,
    strategy_table,
)
from readme_summary import lead, summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "steps.svg"
BEGIN = "<!-- results: written by benchmarks/readme_results.py from benchmarks/results/*.json -->\n"
END = "<!-- results end -->\n"


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args(command_line)
    stale = []
    for name in PAGES:
        page = ROOT / name
        before = page.read_text()
        head, rest = before.split(BEGIN)
        _, tail = rest.split(END)
        after = head + BEGIN + written(name) + END + tail
        if before != after:
            stale.append(name)
            if not arguments.check:
                page.write_text(after)
    steps = RESULTS / "steps.json"
    if steps.exists() and not picture_is_current(results := json.loads(steps.read_text()), PICTURE):
        stale.append(PICTURE.name)
        if not arguments.check:
            draw(results, PICTURE)
    if not arguments.check:
        return 0
    for name in stale:
        print(
            f"[readme] got figures in {name} that are not those of benchmarks/results. "
            "Run benchmarks/readme_results.py."
        )
    return 1 if stale else 0


def written(name: str) -> str:
    """Returns what a page says of the runs that are committed."""
    found = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    found[ALL] = dict(found)
    parts = (part(found[file]) for file, part in PAGES[name] if file in found)
    blocks = list(filter(None, itertools.chain.from_iterable(parts)))
    return "\n" + "\n\n".join(blocks or ["No run is committed yet."]) + "\n\n"


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
)
PS_FAULT_TIMES = pages.Table(
    "And while the others wait in a pull of a parameter server, 4 MiB; until the last of them has "
    'raised, or has pulled without the worker that it left behind (`on_worker_loss="continue"`):',
    {
        "the last worker is": "{kind}",
        "ranks": "{ranks}",
        "counted from": "{counted_from}",
        "median ms": "{median_ms:.1f}",
        "most ms": "{max_ms:.1f}",
    },
    "parameter_server",
)


def fault_tables(results: Json) -> Blocks:
    """Yields how soon a rank that is lost is known."""
    yield from FAULT_TIMES(results)
    yield from PS_FAULT_TIMES(results)
    yield pages.measured_on(results)


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


ALL = "all"  # takes every result, by the name of its file
Part = tuple[str, Callable[[Json], Blocks]]  # is left out where no such run is committed
PAGES: Mapping[str, Sequence[Part]] = {
    "README.md": ((ALL, lead),),
    "docs/benchmarks.md": (
        (ALL, summary),
        ("steps", contest_table()),
        ("steps", phases),
        ("memory", HOST_MEMORY),
        ("memory", LIMIT),
        ("overheads", REDUCER),
        ("overheads", UNITS),
        ("overheads", GATHERED_UNITS),
        ("collectives", COLLECTIVES),
        ("gpu", gpu_tables),
    ),
    "docs/activation_memory.md": (("activation", activation_tables),),
    "docs/parameter_server.md": (("ps", ps_tables),),
    "docs/pipeline.md": (("pipeline", pipeline_tables), ("pipeline", pipeline_bounds)),
    "docs/remote.md": (("remote", remote_tables), ("remote", remote_bounds)),
    "docs/shared_memory.md": (("faults", fault_tables), ("collectives", SHORT_LIST)),
    "docs/ddp.md": (
        ("steps", ddp_tables),
        ("steps", added_by_averaging),
        ("overheads", added_per_gradient),
    ),
    "docs/zero.md": (("steps", contest_table("zero")),),
    "docs/fsdp.md": (("steps", contest_table("fsdp")), ("steps", idle_ranks("fsdp"))),
    "docs/data_parallel.md": (
        ("steps", contest_table("dp")),
        ("steps", idle_ranks("dp")),
        ("overheads", replica_overheads),
    ),
    "docs/strategies.md": (("steps", strategy_table),),
    "docs/optimizers.md": (("optimizers", optimizer_tables),),
    "docs/checkpoint.md": (("checkpoint", checkpoint_tables),),
    "docs/multi_host.md": (("hosts", hosts_tables),),
}


if __name__ == "__main__":
    sys.exit(main())
