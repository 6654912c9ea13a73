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
from dataclasses import asdict, dataclass
from typing import Any

from harness.bench_options import bench_parser, chosen_parts
from harness.exit_codes import exit_code
from harness.fresh_run import run_fresh
from harness.host_memory import HostMemory, measure_host_memory
from harness.machine import machine
from harness.pairs import OURS, TORCH, TORCH_VIEW, Side
from harness.results import write_results
from harness.stats import PairedRatio, verdict
from harness.step_runs import BESIDE, FULL, QUICK, Effort, StepRuns
from harness.strategies import require_trireme
from harness.table import table
from workloads import WORKLOADS, WorkloadOptions

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

MEMORY_WORKLOADS = ("mlp", "gpt")
MEMORY_RANKS = (2, 4)
# With the name under which the estimate knows what its ranks hold.
MEMORY_SIDES = (
    (STAGE_2["torch-optim"], "zero2"),
    (TORCH_VIEW, "ddp"),
    (Side("no sync", "no-sync", {}), "ddp"),
)
BYTES_PER_PARAMETER = 16  # fp32: parameter, gradient, two moments of AdamW
MEMORY_MARGIN = 1.10
RING_MIB = 8  # what a rank deposits its gradients in
ESTIMATE_TOLERANCE = 0.05


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 1 if the estimate of memory is off,
    2 wrong options, 3 a rank failed."""
    arguments = _parser().parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    effort = QUICK if arguments.quick else FULL
    parts = _parts(arguments)
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "workloads": {}}
    if arguments.quick:
        print("Quick run: too few pairs for a verdict that counts.\n")
    for part in parts:
        if part == "memory":
            results["memory"] = bench_memory(MEMORY_WORKLOADS[: 1 if arguments.quick else None])
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
    contests = [Contest.of(runs, (ours, best), effort.pairs, STEP_TARGETS[name])]
    if name in STAGE_1_TARGETS:
        contests.append(Contest.of(runs, (STAGE_1, DDP), effort.pairs, STAGE_1_TARGETS[name]))

    print(runs.table())
    for contest in contests:
        print(f"step time, {contest.ours} / {contest.theirs}:")
        print("\n".join("  " + line for line in contest.ratio.lines()))
    print(flush=True)
    return {
        "torch_best": best.label,
        "torch_zero_best": runs.fastest(TORCH_ZERO).label,
        "contests": [asdict(contest) for contest in contests],
        "runs": runs.to_json(),
    }


@dataclass(frozen=True)
class Contest:
    """Labels of two sides, and the ratio of their steps."""

    ours: str
    theirs: str
    ratio: PairedRatio

    @classmethod
    def of(cls, runs: StepRuns, sides: tuple[Side, Side], pairs: int, target: float) -> Contest:
        ours, theirs = sides
        return cls(ours.label, theirs.label, runs.pair(ours, theirs, pairs, target))


def bench_memory(workloads: Sequence[str]) -> list[dict[str, Any]]:
    """Measures and prints what a host holds; returns its part of the JSON."""
    rows = []
    for workload in workloads:
        for ranks in MEMORY_RANKS:
            for side, planned in MEMORY_SIDES:
                print(f"memory: {workload}, {side.label}, {ranks} ranks", flush=True)
                held = measure_host_memory(side, workload, ranks)
                rows.append(_memory_row(workload, ranks, side, planned, held))
    header = ["MiB of the host", "ranks", "between steps", "limit", "bytes/parameter"]
    header += ["after backward", "model states", "estimated"]
    print(table(header, [_memory_cells(row) for row in rows]))
    for row in rows:
        if "limit" in row:
            share = row["between_steps"] / row["limit"]
            print(f"{_what(row)}: {share:.3f} of the limit: {row['verdict']}")
        if "left_by_torch" in row:
            print(f"{_what(row)}: {row['left_by_torch']:.1f} MiB left beside parameters, moments")
        if not row["estimate_agrees"]:
            print(
                f"[bench_zero] {_what(row)}: estimate_memory said {row['estimated']:.1f} MiB of "
                f"model states, expected {row['model_states']:.1f} within "
                f"{ESTIMATE_TOLERANCE:.0%}. Look at docs/memory.md."
            )
    return rows


def _memory_row(
    workload: str, ranks: int, side: Side, planned: str, held: HostMemory
) -> dict[str, Any]:
    import trireme

    module = WORKLOADS[workload](WorkloadOptions()).model()
    estimate = trireme.estimate_memory(module, planned, ranks)
    estimated = estimate.host.model_states / 2**20
    row = {
        "workload": workload,
        "ranks": ranks,
        "side": side.label,
        "numel": estimate.numel,
        **held.to_json(),
        "estimated": estimated,
        "estimate_agrees": abs(estimated / held.model_states - 1) <= ESTIMATE_TOLERANCE,
    }
    if planned == "zero2":
        of_states = BYTES_PER_PARAMETER * estimate.numel / 2**20
        row["limit"] = MEMORY_MARGIN * of_states + RING_MIB * ranks
        row["verdict"] = verdict(held.between_steps / row["limit"], 1.0)
    if side.strategy == "no-sync":  # what any rank has: first uses of libraries, the allocator
        row["left_by_torch"] = held.between_steps - held.parameters - held.optimizer_state
    return row


def _what(row: dict[str, Any]) -> str:
    return f"{row['workload']}, {row['side']}, {row['ranks']} ranks"


def _memory_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['workload']}, {row['side']}",
        str(row["ranks"]),
        f"{row['between_steps']:.1f}",
        f"{row['limit']:.1f}" if "limit" in row else "",
        f"{row['between_steps'] * 2**20 / row['numel']:.1f}",
        *(f"{row[name]:.1f}" for name in ("after_backward", "model_states", "estimated")),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, PARTS)
    parser.add_argument(
        "--ours", choices=STAGE_2, default="torch-optim", help="how our stage 2 steps in the pairs"
    )
    return parser


def _parts(arguments: argparse.Namespace) -> list[str]:
    parts = chosen_parts("bench_zero", arguments.only, PARTS)
    require_trireme("bench_zero", "then run this again.")
    return parts


if __name__ == "__main__":
    sys.exit(main())
