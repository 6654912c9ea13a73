"""What a host holds under every strategy, beside torch's classes and beside what is estimated.

    python benchmarks/bench_memory.py --json benchmarks/results/memory.json
    python benchmarks/bench_memory.py --only mlp --quick

mlp, gpt (6 and 9 minutes): the sum of PSS over the ranks of a host between two steps and after a
backward, less what they held before they built their model (measure/host_memory.py), at 2 and 4
ranks; and at their fullest moment, at 2 ranks (measure/peak_memory.py). Ranks that never talk show
what torch itself leaves of a step. trireme.estimate_memory has to agree with what tensors take.
DataParallel, one process with 2 replicas, is compared with our DDP of 2 ranks.

limit (7 minutes): the widest `mlp` that 2 ranks train for three steps without ever taking more than
2 GiB beyond what they held before they built it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from measure.bench_options import run_in_parts
from measure.host_memory import measure_host_memory
from measure.memory_report import measure_memory
from measure.peak_memory import measure_peak, measure_peak_of, widest_fitting
from measure.sides import DDP, DP, FSDP, NO_SYNC, TORCH_FSDP2, TORCH_VIEW, ZERO_1, ZERO_2

WORKLOAD_NAMES = ("mlp", "gpt")
PARTS = (*WORKLOAD_NAMES, "limit")

# With the name under which the estimate knows what its ranks hold.
SIDES = (
    (FSDP, "fsdp"),
    (TORCH_FSDP2[0], "fsdp"),
    (ZERO_2, "zero2"),
    (ZERO_1, "zero1"),
    (DDP, "ddp"),
    (TORCH_VIEW, "ddp"),
    (NO_SYNC, "ddp"),
    (DP, None),  # its estimate assumes the worst, gradients of all replicas at once
)

LIMIT_SIDES = (TORCH_VIEW, DDP, ZERO_1, ZERO_2, FSDP, TORCH_FSDP2[0])
LIMIT_MIB = 2048.0
WIDTHS = range(1024, 3073, 64)
QUICK_WIDTHS = range(256, 385, 64)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 1 if the estimate of memory is off,
    2 wrong options, 3 a rank failed."""
    return run_in_parts("bench_memory", __doc__, PARTS, _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    if part == "limit":
        results["limit"] = bench_limit(QUICK_WIDTHS if quick else WIDTHS)
        return True
    ranks = (2,) if quick else (2, 4)
    rows = measure_memory(part, ranks, SIDES, measure_host_memory, measure_peak_of)
    results["workloads"][part] = {"memory": rows}
    return all(row["estimate_agrees"] for row in rows)


def bench_limit(widths: Sequence[int]) -> dict[str, Any]:
    """Finds and prints the widest `mlp` of every side; returns its part of the JSON."""
    print(f"limit: mlp, 2 ranks, {LIMIT_MIB:.0f} MiB", flush=True)
    found = {}
    for side in LIMIT_SIDES:
        fitting = widest_fitting(partial(measure_peak, side), LIMIT_MIB, widths)
        found[side.label] = fitting
        peaks = ", ".join(f"{width}: {peak:.0f}" for width, peak in fitting.peaks.items())
        print(f"  {side.label}: width {fitting.width} (MiB by width: {peaks})", flush=True)
    return {
        "limit_mib": LIMIT_MIB,
        "step": widths[1] - widths[0],
        "sides": {label: asdict(fitting) for label, fitting in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
