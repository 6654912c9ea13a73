"""DataParallel against our own DDP and against one process: step time, memory, what it adds.

    python benchmarks/bench_dp.py --json benchmarks/results/dp.json
    python benchmarks/bench_dp.py --only narrow --add --json benchmarks/results/dp.json

mlp, gpt (4 and 12 minutes): one process with 2 replicas of one thread each, against our DDP with 2
ranks of one thread each through shared memory. narrow (3 minutes): the same process against one
that computes with 2 threads, on layers so small that threads hardly help. Torch's DDP over Gloo is
measured beside: torch's DataParallel does nothing on the CPU. Fresh processes run in rounds of one
run per side, every other round in reversed order, all with torch's fused AdamW.

memory (3 minutes): what a host holds beyond what its processes held before they built the model,
between two steps, after a backward (as in bench_zero.py) and at its fullest moment
(harness/peak_memory.py), in proportion to DDP.

python: the share of a step that is Python (harness/replica_steps.py); no target.

overhead: what a call of a Linear(8, 8) takes longer through 2 replicas, against 150 us or three
wake-ups of a thread on this machine, whichever is more (harness/replica_overhead.py).

replicate: the bytes that a step copies so that the replicas are like the module. On the CPU these
are none.

A target is met when the median of the paired ratios is at or below it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from harness.bench_options import (
    begin_results,
    bench_parser,
    chosen_parts,
    earlier_results,
    let_add,
    write_added,
)
from harness.exit_codes import exit_code
from harness.fresh_run import RANKS, run_fresh
from harness.host_memory import measure_host_memory
from harness.pairs import OURS, TORCH, Side, measure_all
from harness.peak_memory import measure_peak_of
from harness.replica_overhead import measure_replica_overhead
from harness.replica_steps import ReplicaSteps, measure_replica_steps
from harness.stats import PairedRatio
from harness.step_runs import BESIDE, FULL, QUICK, Contest, Effort, StepRuns
from harness.table import table
from workloads import WORKLOADS, WorkloadOptions

DP = Side("dp", "dp", {})
DDP = OURS["shm"]
ONE_PROCESS = BESIDE[0]

OPPONENTS = {"mlp": (DDP, 1.05), "gpt": (DDP, 1.05), "narrow": (ONE_PROCESS, 0.75)}
PARTS = (*OPPONENTS, "memory", "python", "overhead", "replicate")

MEMORY_WORKLOADS = ("mlp", "gpt")
MEMORY_TARGET = 0.75
MEMORY_KINDS = ("between_steps", "after_backward", "peak")

WAKE_UPS, ENOUGH_US = 3, 150.0


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    parser = bench_parser(__doc__, PARTS)
    let_add(parser)
    arguments = parser.parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    effort = QUICK if arguments.quick else FULL
    parts = chosen_parts("bench_dp", arguments.only, PARTS)
    earlier = earlier_results("bench_dp", arguments)
    results = begin_results(arguments.quick)
    whole: dict[str, Callable[[Effort], Any]] = {
        "python": bench_python,
        "overhead": bench_overhead,
        "replicate": bench_replicate,
    }
    for part in parts:
        if part in OPPONENTS:
            results["workloads"][part] = bench_workload(part, effort)
        elif part == "memory":
            workloads = MEMORY_WORKLOADS[: 1 if arguments.quick else None]
            results["memory"], results["memory_contests"] = bench_memory(workloads, effort)
        else:
            results[part] = whole[part](effort)
    if arguments.json is not None:
        write_added(arguments.json, results, earlier, parts)
    return 0


def bench_workload(name: str, effort: Effort) -> dict[str, Any]:
    """Measures and prints one workload; returns its part of the JSON."""
    print(f"{name}: {effort.steps} steps after warm-up in fresh processes", flush=True)
    opponent, target = OPPONENTS[name]
    runs = StepRuns(lambda side: run_fresh(side, name, effort.steps))
    beside = [side for side in (*BESIDE, *TORCH, DDP) if side != opponent]
    runs.add(beside, repeats=1)
    contests = runs.contests([(DP, opponent, target)], effort.pairs)
    runs.print_with(contests)
    return {
        "torch_best": runs.fastest(TORCH).label,
        "contests": [asdict(contest) for contest in contests],
        "runs": runs.to_json(),
    }


def bench_memory(workloads: Sequence[str], effort: Effort) -> tuple[list[Any], list[Any]]:
    """Measures and prints what hosts hold; returns the rows and the ratios for the JSON."""
    rows, contests = [], []
    for workload in workloads:
        print(f"memory: {workload}, {RANKS} replicas or ranks", flush=True)
        numel = sum(p.numel() for p in WORKLOADS[workload](WorkloadOptions()).model().parameters())
        measure = partial(_held, workload=workload)
        found = measure_all((DP, DDP), effort.repeats, measure)
        found |= measure_all((ONE_PROCESS,), 1, measure)
        for label, runs in found.items():
            held = {kind: statistics.median(run[kind] for run in runs) for kind in MEMORY_KINDS}
            row = {"workload": workload, "side": label, "ranks": RANKS, "numel": numel}
            rows.append(row | held)
        for kind in MEMORY_KINDS:
            ours, theirs = ([run[kind] for run in found[side.label]] for side in (DP, DDP))
            contest = Contest(DP.label, DDP.label, PairedRatio.of(ours, theirs, MEMORY_TARGET))
            contests.append({"workload": workload, "kind": kind, **asdict(contest)})
    cells = [
        [f"{row['workload']}, {row['side']}", *(f"{row[kind]:.1f}" for kind in MEMORY_KINDS)]
        for row in rows
    ]
    print(table(["MiB of the host", "between steps", "after backward", "at most"], cells))
    for one in contests:
        ratio = one["ratio"]
        print(
            f"{one['workload']}, {one['kind']}, {one['ours']} / {one['theirs']}: "
            f"{ratio['median']:.3f}, target <= {ratio['target']:g}: {ratio['verdict']}"
        )
    print(flush=True)
    return rows, contests


def _held(side: Side, workload: str) -> dict[str, float]:
    """MiB, by MEMORY_KINDS."""
    host = measure_host_memory(side, workload, RANKS)
    peak = measure_peak_of(side, workload)
    return dict(zip(MEMORY_KINDS, (host.between_steps, host.after_backward, peak), strict=True))


def bench_python(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints the share of Python in a step; returns its part of the JSON."""
    found = []
    for workload in OPPONENTS:
        for side in (DP, ONE_PROCESS):
            steps = measure_replica_steps(side, workload, effort.steps)
            row = {"workload": workload, "side": side.label, **asdict(steps)}
            found.append(row | {"python_share": steps.python_share})
    rows = [
        [
            f"{row['workload']}, {row['side']}",
            *(f"{row[f'{who}_ms']:.2f}" for who in ("step", "caller_python", "replica_python")),
            f"{row['python_share']:.1%}",
        ]
        for row in found
    ]
    header = ["ms under the profiler", "step", "Python, caller", "Python, replicas", "share"]
    print(table(header, rows), "\n", flush=True)
    return found


def bench_overhead(effort: Effort) -> dict[str, Any]:
    """Measures and prints what a small call takes longer; returns its part of the JSON."""
    runs = [measure_replica_overhead(effort.blocks) for _ in range(effort.pairs)]
    added = [run.added_to_forward for run in runs]
    allowed = [max(ENOUGH_US, WAKE_UPS * run.wake_up) for run in runs]
    ratio = PairedRatio.of(added, allowed, 1.0)
    medians = {
        "forward": statistics.median(run.direct_forward for run in runs),
        "through 2 replicas": statistics.median(run.parallel_forward for run in runs),
        "added": statistics.median(added),
        "step": statistics.median(run.direct_step for run in runs),
        "step through 2 replicas": statistics.median(run.parallel_step for run in runs),
        "wake-up": statistics.median(run.wake_up for run in runs),
        "allowed": statistics.median(allowed),
    }
    print(table(["us of Linear(8, 8)", ""], [[k, f"{v:.1f}"] for k, v in medians.items()]))
    print("added to a forward / allowed:")
    print("\n".join("  " + line for line in ratio.lines()), "\n", flush=True)
    return {
        "added_us": medians["added"],
        "wake_up_us": medians["wake-up"],
        "ratio": asdict(ratio),
        "runs": [asdict(run) for run in runs],
    }


def bench_replicate(effort: Effort) -> dict[str, Any]:
    """Counts and prints what steps copy; returns its part of the JSON."""
    found: dict[str, ReplicaSteps] = {
        workload: measure_replica_steps(DP, workload, effort.steps) for workload in OPPONENTS
    }
    copied = {workload: max(steps.copied_bytes) for workload, steps in found.items()}
    held = {workload: max(steps.own_bytes) for workload, steps in found.items()}
    verdict = "missed" if any(copied.values()) else "met"
    rows = [[workload, str(copied[workload]), str(held[workload])] for workload in found]
    print(table(["bytes", "copied in a step", "held by a replica"], rows))
    print(f"copied, target 0: {verdict}\n", flush=True)
    return {"copied_bytes": copied, "own_bytes": held, "verdict": verdict}


if __name__ == "__main__":
    sys.exit(main())
