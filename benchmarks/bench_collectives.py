"""The backend "trireme" against Gloo: collectives between the ranks of one host.

    python benchmarks/bench_collectives.py --json benchmarks/results/collectives.json
    python benchmarks/bench_collectives.py --ranks 4 --quick
    python benchmarks/bench_collectives.py --raw build/benchmarks/shm_collectives

Through torch.distributed from Python, both backends in the same processes, in alternating order,
several fresh sets of processes. Beside them: the time in which all ranks at once copy as many
bytes, and read and write them in place. With --raw also the collectives without torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure.bad_input import BadInput
from measure.collective_rounds import (
    OPERATIONS,
    CollectiveCase,
    CollectiveTimes,
    measure_collective,
)
from measure.exit_codes import exit_code
from measure.machine import cores, machine
from measure.results import write_results
from measure.stats import PairedRatio
from measure.strategies import require_trireme
from measure.table import table

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 64 * KIB, MIB, 25 * MIB, 256 * MIB)
# How many times faster than Gloo, with 2 ranks on 2 cores.
FACTORS = {
    "all_reduce": {4: 6, 64 * KIB: 40, MIB: 25, 25 * MIB: 6, 256 * MIB: 6},
    "reduce_scatter": {64 * KIB: 40, MIB: 20, 25 * MIB: 12, 256 * MIB: 12},
    "all_gather": {64 * KIB: 7, MIB: 12, 25 * MIB: 8, 256 * MIB: 10},
}
FACTOR_OVERSUBSCRIBED = 4  # 4 ranks on 2 cores, from 64 KiB
COPY_TARGET = 1.3  # an all_reduce of 25 MiB and more against a copy by all ranks


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    arguments = _parser().parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    require_trireme("bench_collectives", "then run this again.")
    if arguments.ranks < 2:
        raise BadInput("bench_collectives", "got fewer than 2 ranks", "Pass --ranks 2.")
    results: dict[str, Any] = {
        "machine": machine(),
        "ranks": arguments.ranks,
        "quick": arguments.quick,
        "operations": {},
    }
    for operation in OPERATIONS:
        results["operations"][operation] = bench(operation, arguments.ranks, arguments.quick)
    if arguments.raw is not None:
        results["raw"] = bench_raw(arguments.raw, arguments.ranks)
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


def bench(operation: str, ranks: int, quick: bool) -> dict[str, Any]:
    """Measures and prints one operation over all sizes; returns its part of the JSON."""
    rows, found = [], {}
    for size in SIZES:
        if operation != "all_reduce" and size < 4 * ranks:
            continue
        parts = [
            measure_collective(CollectiveCase(operation, size, ranks, 2 if quick else 5))
            for _ in range(1 if quick else 3)
        ]
        times = CollectiveTimes(
            *([us for part in parts for us in getattr(part, name)] for name in asdict(parts[0]))
        )
        factor = _factor(operation, size, ranks)
        ratio = PairedRatio.of(times.ours, times.gloo, 1 / factor if factor else 1.0)
        against_copy = PairedRatio.of(times.ours, times.copy, COPY_TARGET)
        in_place = statistics.median(times.in_place) / statistics.median(times.ours)
        rows.append(
            [
                _size_text(size),
                f"{statistics.median(times.ours):.1f}",
                f"{statistics.median(times.gloo):.1f}",
                f"{1 / ratio.median:.1f}x",
                f"{1 / ratio.quartiles[1]:.1f}x - {1 / ratio.quartiles[0]:.1f}x",
                f">= {factor}x: {ratio.verdict}" if factor else "-",
                f"{against_copy.median:.2f}",
                f"{in_place:.0%}",
            ]
        )
        found[str(size)] = {
            "times_us": asdict(times),
            "ratio_to_gloo": ratio.to_json(),
            "ratio_to_copy": against_copy.to_json(),
        }
    header = ["", "ours us", "Gloo us", "faster", "quartiles", "target"]
    print(f"{operation}, {ranks} ranks on {cores()} cores, fp32, through torch.distributed")
    print(table([*header, "of a copy's time", "of the in-place pass"], rows), flush=True)
    print()
    return found


def bench_raw(program: Path, ranks: int) -> list[dict[str, Any]]:
    """Runs them without torch; see benchmarks/cpp/shm_collectives.cpp."""
    if not program.exists():
        raise BadInput(
            "bench_collectives", f"got no program {program}", "Build the target shm_collectives."
        )
    command = [str(program), str(ranks), *map(str, SIZES)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    names = [name for name in found[0] if name not in ("ranks", "bytes")]
    rows = [[_size_text(row["bytes"]), *(f"{row[name]:.2f}" for name in names)] for row in found]
    print("raw from C++, us per call")
    print(table(["", *names], rows), flush=True)
    return found


def _factor(operation: str, size: int, ranks: int) -> int | None:
    if ranks > cores():
        return FACTOR_OVERSUBSCRIBED if size >= 64 * KIB else None
    return FACTORS.get(operation, {}).get(size)


def _size_text(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that all works")
    parser.add_argument("--raw", type=Path, help="the built program shm_collectives")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
