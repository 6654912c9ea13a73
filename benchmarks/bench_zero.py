"""ZeRO stages 1 and 2 against torch's fastest DDP: step time, and the memory of a host.

    python benchmarks/bench_zero.py --json benchmarks/results/zero.json
    python benchmarks/bench_zero.py --only mlp,memory --quick

Per workload torch's DDP is measured with its option sets, and the fastest one becomes the opponent
of stage 2; on `mlp` our own DDP is that of stage 1. Fresh processes run in pairs, in alternating
order, 2 ranks x 1 thread, ours over the backend "trireme", torch's over Gloo, both with torch's
fused AdamW. A target is met when the median of the paired ratios is at or below it. Measured beside
are stage 2 with trireme.optim's AdamW, with that inside fused_step=True, and over Gloo, and torch's
own ZeRO (stage 1). --ours makes one of these the side that is paired.

The memory of a host is the sum of PSS over its ranks between two steps, less what the ranks held
before they built their model; ranks that never talk show what torch itself leaves of a step.
trireme.estimate_memory has to agree with what tensors take.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.bench_options import begin_results, bench_parser, chosen_parts
from harness.exit_codes import exit_code
from harness.fresh_run import run_fresh
from harness.host_memory import measure_host_memory
from harness.memory_report import NO_SYNC, WORKLOAD_NAMES, measure_memory
from harness.pairs import OURS, TORCH, TORCH_VIEW, Side
from harness.results import write_results
from harness.step_runs import BESIDE, FULL, QUICK, Effort, StepRuns

STEP_TARGETS = {"mlp": 0.58, "gpt": 1.0, "gpt-small-batch": 0.8}
STAGE_1_TARGETS = {"mlp": 0.9}
PARTS = (*STEP_TARGETS, "memory")

DDP = OURS["shm"]
STAGE_1 = Side("zero1", "zero1", {})
STAGE_2 = {
    "torch-optim": Side("zero2", "zero2", {}),
    "trireme-optim": Side("zero2, trireme.optim", "zero2", {}, "trireme"),
    "fused-step": Side("zero2, fused step", "zero2", {"fused_step": True}, "trireme"),
}
STAGE_2_GLOO = Side("zero2 over Gloo", "zero2-gloo", {"host_params": False})
TORCH_ZERO = (
    Side("torch-zero1", "torch-zero1", {}),
    Side("torch-zero1 + view", "torch-zero1", {"parameters_as_bucket_view": True}),
)

# With the name under which the estimate knows what its ranks hold.
MEMORY_SIDES = ((STAGE_2["torch-optim"], "zero2"), (TORCH_VIEW, "ddp"), (NO_SYNC, "ddp"))


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 1 if the estimate of memory is off,
    2 wrong options, 3 a rank failed."""
    arguments = _parser().parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    effort = QUICK if arguments.quick else FULL
    parts = chosen_parts("bench_zero", arguments.only, PARTS)
    results = begin_results(arguments.quick)
    for part in parts:
        if part == "memory":
            workloads = WORKLOAD_NAMES[: 1 if arguments.quick else None]
            results["memory"] = measure_memory(
                "bench_zero", workloads, MEMORY_SIDES, measure_host_memory
            )
        else:
            results["workloads"][part] = bench_workload(part, STAGE_2[arguments.ours], effort)
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0 if all(row["estimate_agrees"] for row in results.get("memory", [])) else 1


def bench_workload(name: str, ours: Side, effort: Effort) -> dict[str, Any]:
    """Measures and prints one workload; returns its part of the JSON."""
    beside = [side for side in STAGE_2.values() if side != ours]
    beside += [STAGE_2_GLOO, *TORCH_ZERO]
    if name not in STAGE_1_TARGETS:
        beside += [DDP, STAGE_1]

    print(f"{name}: {effort.steps} steps after warm-up in fresh processes", flush=True)
    runs = StepRuns(lambda side: run_fresh(side, name, effort.steps))
    runs.add((*BESIDE, *TORCH, *beside), effort.repeats)
    best = runs.fastest(TORCH)
    pairs = [(ours, best, STEP_TARGETS[name])]
    if name in STAGE_1_TARGETS:
        pairs.append((STAGE_1, DDP, STAGE_1_TARGETS[name]))
    contests = [contest for pair in pairs for contest in runs.contests([pair], effort.pairs)]
    runs.print_with(contests)
    return {
        "torch_best": best.label,
        "torch_zero_best": runs.fastest(TORCH_ZERO).label,
        "contests": [asdict(contest) for contest in contests],
        "runs": runs.to_json(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, PARTS)
    parser.add_argument(
        "--ours", choices=STAGE_2, default="torch-optim", help="how our stage 2 steps in the pairs"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
