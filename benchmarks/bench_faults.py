"""A rank dies or stops: how long until all others raise, naming it.

    python benchmarks/bench_faults.py --json benchmarks/results/faults.json
    python benchmarks/bench_faults.py --tries 2

Through torch.distributed from Python, backend "trireme", ranks of one host, one thread each; and
with workers of a parameter server, who raise or go on (measure/ps_faults.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.bad_input import BadInput
from measure.exit_codes import exit_code
from measure.fault_trials import DEADLINE_S, KINDS, FaultCase, measure_fault
from measure.machine import cores, machine
from measure.ps_faults import PS_FAULTS, measure_ps_fault
from measure.results import write_results
from measure.strategies import require_trireme
from measure.table import table

WORLDS = (2, 4)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 wrong options, 3 a rank did not raise or named nobody."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=10, help="per row")
    parser.add_argument("--json", type=Path, help="where the results go")
    arguments = parser.parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    require_trireme("bench_faults", "then run this again.")
    if arguments.tries < 1:
        raise BadInput("bench_faults", f"got {arguments.tries} tries", "Pass --tries 10.")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the ranks' errors are what is wanted
    tries = range(arguments.tries)
    results: dict[str, Any] = {
        "machine": machine(),
        "tries": arguments.tries,
        "deadline_s": DEADLINE_S,
        "cases": [
            _row(kind, world, [measure_fault(FaultCase(kind, world)) for _ in tries])
            for world in WORLDS
            for kind in KINDS
        ],
    }
    print(f"until all others have raised, {arguments.tries} tries each, {cores()} cores")
    _show("the last rank is", results["cases"])
    results["parameter_server"] = [
        {
            **_row(fault.kind, world, [measure_ps_fault(fault, world) for _ in tries]),
            "counted_from": fault.counted_from,
        }
        for world in WORLDS
        for fault in PS_FAULTS
    ]
    print("until all others have raised, or have pulled without it")
    _show("the last worker is", results["parameter_server"])
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


def _row(kind: str, world: int, times: list[float]) -> dict[str, Any]:
    median, most = statistics.median(times), max(times)
    return {"kind": kind, "ranks": world, "median_ms": median, "max_ms": most, "ms": times}


def _show(what: str, rows: Sequence[dict[str, Any]]) -> None:
    cells = [
        [row["kind"], str(row["ranks"]), f"{row['median_ms']:.1f}", f"{row['max_ms']:.1f}"]
        for row in rows
    ]
    print(table([what, "ranks", "median ms", "most ms"], cells))


if __name__ == "__main__":
    sys.exit(main())
