"""Writes the results into README.md and docs/ from the committed JSON: no figure is typed by hand.

python benchmarks/readme_results.py          rewrite the pages
python benchmarks/readme_results.py --check  exit 1 if one of them is not what the JSON says

Either way a target that docs/benchmarks.md does not explain is an error (readme_goals.py).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from readme_activation import activation_tables
from readme_checkpoint import checkpoint_tables
from readme_costs import (
    COLLECTIVES,
    GATHERED_UNITS,
    HOST_MEMORY,
    LIMIT,
    REDUCER,
    SHORT_LIST,
    UNITS,
    fault_tables,
    hosts_tables,
    optimizer_tables,
    replica_overheads,
)
from readme_goals import goals, lacking
from readme_gpu import gpu_tables
from readme_pipeline import pipeline_tables
from readme_ps import ps_tables
from readme_remote import remote_tables
from readme_steps import (
    added_per_gradient,
    contest_table,
    ddp_tables,
    draw,
    phases,
    picture_is_current,
    strategy_table,
)
from readme_summary import lead, summary
from readme_tables import Blocks, Json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "steps.svg"
REGION = re.compile(
    r"(<!-- (results|goals): written by benchmarks/readme_results\.py from benchmarks/results/\S+ "
    r"-->\n).*?(<!-- \2 end -->\n)",
    re.S,
)
NOTHING = "No run is committed yet."
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
    "docs/pipeline.md": (("pipeline", pipeline_tables),),
    "docs/remote.md": (("remote", remote_tables),),
    "docs/shared_memory.md": (("faults", fault_tables), ("collectives", SHORT_LIST)),
    "docs/ddp.md": (("steps", ddp_tables), ("overheads", added_per_gradient)),
    "docs/zero.md": (("steps", contest_table("zero")),),
    "docs/fsdp.md": (("steps", contest_table("fsdp")),),
    "docs/data_parallel.md": (("steps", contest_table("dp")), ("overheads", replica_overheads)),
    "docs/strategies.md": (("steps", strategy_table),),
    "docs/optimizers.md": (("optimizers", optimizer_tables),),
    "docs/checkpoint.md": (("checkpoint", checkpoint_tables),),
    "docs/multi_host.md": (("hosts", hosts_tables),),
}


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args(command_line).check
    files = _files()
    wrong = list(lacking(files))
    for name in PAGES:
        page = ROOT / name
        before = page.read_text()
        after = REGION.sub(partial(_rewritten, name), before)
        if before != after and check:
            wrong.append(_stale(name))
        elif before != after:
            page.write_text(after)
    if "steps" in files and not picture_is_current(files["steps"], PICTURE):
        if check:
            wrong.append(_stale(PICTURE.name))
        else:
            draw(files["steps"], PICTURE)
    for line in wrong:
        print(f"[readme] {line}.")
    return 1 if wrong else 0


def _rewritten(name: str, region: re.Match[str]) -> str:
    return region[1] + written(name, region[2]) + region[3]


def _files() -> dict[str, Json]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def _stale(name: str) -> str:
    return (
        f"got figures in {name} that are not those of benchmarks/results. "
        "Run benchmarks/readme_results.py"
    )


def written(name: str, region: str = "results") -> str:
    """Returns what a region of a page says of the runs that are committed."""
    files = _files()
    found: Mapping[str, Json] = {**files, ALL: files}
    parts = PAGES[name] if region == "results" else ((ALL, goals),)
    blocks = [block for file, part in parts if file in found for block in part(found[file])]
    return "\n" + "\n\n".join(list(filter(None, blocks)) or [NOTHING]) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
