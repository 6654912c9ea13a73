"""A rank dies or stops: how long until all others raise, naming it.

    python benchmarks/bench_faults.py --json benchmarks/results/faults.json
    python benchmarks/bench_faults.py --tries 2

Through torch.distributed from Python, backend "trireme", ranks of one host, one thread each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.bad_input import BadInput
from harness.exit_codes import exit_code
from harness.fault_trials import DEADLINE_S, KINDS, FaultCase, measure_fault
from harness.machine import cores, machine
from harness.results import write_results
from harness.strategies import require_trireme
from harness.table import table

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
    results: dict[str, Any] = {
        "machine": machine(),
        "tries": arguments.tries,
        "deadline_s": DEADLINE_S,
        "cases": [],
    }
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the ranks' errors are what is wanted
    rows = []
    for world in WORLDS:
        for kind in KINDS:
            times = [measure_fault(FaultCase(kind, world)) for _ in range(arguments.tries)]
            median, most = statistics.median(times), max(times)
            results["cases"].append(
                {"kind": kind, "ranks": world, "median_ms": median, "max_ms": most, "ms": times}
            )
            rows.append([kind, str(world), f"{median:.1f}", f"{most:.1f}"])
    print(f"until all others have raised, {arguments.tries} tries each, {cores()} cores")
    print(table(["the last rank is", "ranks", "median ms", "most ms"], rows))
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
