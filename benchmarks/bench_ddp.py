"""DistributedDataParallel against torch's: step time, memory, and what the reducer itself costs.

    python benchmarks/bench_ddp.py --json benchmarks/results/ddp.json
    python benchmarks/bench_ddp.py --ours shm --json benchmarks/results/ddp_shm.json
    python benchmarks/bench_ddp.py --only mlp,overhead --quick

Per workload torch's three option sets are measured and the fastest one becomes the opponent. Then
fresh processes run in pairs, in alternating order, 2 ranks x 1 thread, the same fused AdamW on both
sides. torch's side runs over Gloo, which is all it has on CPU; ours over Gloo too, or (--ours shm)
over the backend "trireme". A target is met when the median of the paired ratios ours / torch is at
or below it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.bench_options import begin_results, bench_parser, chosen_parts
from harness.exit_codes import exit_code
from harness.fresh_run import RANKS, RunTimes, run_fresh
from harness.pairs import OURS, TORCH, TORCH_VIEW, Side, measure_all, measure_pairs
from harness.reducer_overhead import NUMEL, PARAMETERS, Overhead, measure_overhead
from harness.results import write_results
from harness.stats import PairedRatio, verdict
from harness.step_runs import BESIDE, FULL, QUICK, Effort, StepRuns
from harness.table import table

WORKLOAD_NAMES = ("mlp", "gpt", "gpt-small-batch")
PARTS = (*WORKLOAD_NAMES, "overhead")
STEP_TARGETS = {
    "gloo": dict.fromkeys(WORKLOAD_NAMES, 1.0),
    "shm": {"mlp": 0.65, "gpt": 0.98, "gpt-small-batch": 0.75},
}
MEMORY_TARGET = 1.0
OVERHEAD_TARGET = 0.5


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    arguments = _parser().parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    effort = QUICK if arguments.quick else FULL
    parts = chosen_parts("bench_ddp", arguments.only, PARTS)
    results = begin_results(arguments.quick)
    ours = OURS[arguments.ours]
    for part in parts:
        if part == "overhead":
            results["reducer_overhead"] = bench_overhead(ours, effort)
        else:
            target = STEP_TARGETS["shm" if arguments.ours == "shm" else "gloo"][part]
            results["workloads"][part] = bench_workload(part, ours, effort, target)
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


def bench_workload(name: str, ours: Side, effort: Effort, target: float) -> dict[str, Any]:
    """Measures and prints one workload; returns its part of the JSON."""
    print(f"{name}: {effort.steps} steps after warm-up in fresh processes", flush=True)
    runs = StepRuns(lambda side: run_fresh(side, name, effort.steps))
    runs.add((*BESIDE, *TORCH), effort.repeats)
    best = runs.fastest(TORCH)
    (contest,) = runs.contests([(ours, best, target)], effort.pairs)
    ratio = contest.ratio

    print(runs.table())
    print(f"step time, {ours.label} / {best.label} (torch's fastest here):")
    print("\n".join("  " + line for line in ratio.lines()))
    memory = _memory_ratio(runs.by_label[ours.label], runs.by_label[TORCH_VIEW.label])
    print(
        f"peak memory per rank, {ours.label} / {TORCH_VIEW.label}: {memory['ratio']:.3f}, "
        f"target <= {MEMORY_TARGET:g}: {memory['verdict']}\n",
        flush=True,
    )
    return {
        "torch_best": best.label,
        "step_ratio": ratio.to_json(),
        "memory": memory,
        "runs": runs.to_json(),
    }


def bench_overhead(ours: Side, effort: Effort) -> dict[str, Any]:
    """Measures and prints the reducer's own cost; returns its part of the JSON."""

    def measure(side: Side) -> Overhead:
        return measure_overhead(side, RANKS, effort.blocks)

    print(
        f"reducer overhead: {PARAMETERS} parameters of {NUMEL} elements, world {RANKS}, "
        "fake process group",
        flush=True,
    )
    runs = measure_all(TORCH, effort.repeats, measure)
    best = min(TORCH, key=lambda side: statistics.median(run.added_ms for run in runs[side.label]))
    pairs = measure_pairs(ours, best, effort.pairs, measure)
    runs[ours.label] = pairs.ours
    runs[best.label] = runs[best.label] + pairs.theirs
    alone = measure_all(
        (ours, best), effort.repeats, lambda side: measure_overhead(side, 1, effort.blocks)
    )

    rows = [[label, *_overhead_cells(found)] for label, found in runs.items()]
    rows += [[f"{label}, world 1 (not scored)", *_overhead_cells(f)] for label, f in alone.items()]
    print(table(["", "bare ms", "wrapped ms", "added ms", "added us/parameter"], rows))
    ratio = PairedRatio.of(
        [run.added_ms for run in pairs.ours],
        [run.added_ms for run in pairs.theirs],
        OVERHEAD_TARGET,
    )
    print(f"added time, {ours.label} / {best.label} (torch's cheapest here):")
    print("\n".join("  " + line for line in ratio.lines()), flush=True)
    return {
        "torch_best": best.label,
        "added_ratio": ratio.to_json(),
        "runs": {label: [asdict(run) for run in found] for label, found in runs.items()},
        "world_1": {label: [asdict(run) for run in found] for label, found in alone.items()},
    }


def _overhead_cells(runs: Sequence[Overhead]) -> list[str]:
    bare = statistics.median(run.bare_ms for run in runs)
    wrapped = statistics.median(run.wrapped_ms for run in runs)
    added = statistics.median(run.added_ms for run in runs)
    return [f"{bare:.3f}", f"{wrapped:.3f}", f"{added:.3f}", f"{added / PARAMETERS * 1e3:.2f}"]


def _memory_ratio(ours: Sequence[RunTimes], torch_view: Sequence[RunTimes]) -> dict[str, Any]:
    mine = statistics.median(run.peak_rss_mib for run in ours)
    theirs = statistics.median(run.peak_rss_mib for run in torch_view)
    return {"ratio": mine / theirs, "verdict": verdict(mine / theirs, MEMORY_TARGET)}


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, PARTS)
    parser.add_argument("--ours", choices=OURS, default="gloo", help="our options")
    return parser


if __name__ == "__main__":
    sys.exit(main())
