"""Dense tables of a parameter server beside torch RPC and Gloo's messages, on one host.

    python benchmarks/bench_ps.py --json benchmarks/results/ps.json
    python benchmarks/bench_ps.py --quick

Two processes with one thread each; all sides take turns in them, through Python, in alternating
order. A push of ours applies SGD before it returns; one of RPC and Gloo only moves the bytes. A
pull of ours fills the parameters of a module; "bound" is one under bsp, where these lie in the
table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.exit_codes import exit_code
from harness.machine import cores, machine
from harness.ps_rounds import PsCase, measure_ps
from harness.results import write_results
from harness.stats import PairedRatio
from harness.strategies import require_trireme
from harness.table import table

MIB = 1 << 20
SIZES = {"4 B": 4, "1 MiB": MIB, "25 MiB": 25 * MIB}
# Ours, beside whom, and how many times faster by size.
TARGETS = {
    "ours pull": ("rpc pull", {"4 B": 40, "1 MiB": 7, "25 MiB": 2.2}),
    "ours push": ("rpc push", {"4 B": 20, "1 MiB": 5, "25 MiB": 1.3}),
}
BOUND_US = 10  # a pull of a bound module takes at most so long


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that all works")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    arguments = parser.parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    require_trireme("bench_ps", "then run this again.")
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "sizes": {}}
    for name, size in SIZES.items():
        times = measure_ps(PsCase(size, 2 if arguments.quick else 7))
        results["sizes"][name] = show(name, times)
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


def show(size: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Prints the times of a size in us, and returns them with the ratios to RPC."""
    ratios = {
        ours: PairedRatio.of(times[ours], times[theirs], 1 / factors[size])
        for ours, (theirs, factors) in TARGETS.items()
    }
    rows = []
    for side, found in times.items():
        note = ""
        if side in ratios:
            theirs, factors = TARGETS[side]
            ratio = ratios[side]
            note = f"{1 / ratio.median:.1f}x {theirs}, target {factors[size]}x: {ratio.verdict}"
        elif side == "ours pull, bound":
            note = f"target {BOUND_US} us"
        rows.append(
            [
                side,
                f"{statistics.median(found):.1f}",
                f"{min(found):.1f}",
                f"{max(found):.1f}",
                note,
            ]
        )
    print(f"{size}, 2 processes on {cores()} cores, us per call")
    print(table(["", "median", "least", "most", ""], rows), flush=True)
    print()
    return {
        "times_us": times,
        "ratios_to_rpc": {side: ratio.to_json() for side, ratio in ratios.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
