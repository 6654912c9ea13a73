"""fully_shard against torch's FSDP2 and DDP: step time, what units cost, the memory of a host.

    python benchmarks/bench_fsdp.py --json benchmarks/results/fsdp.json
    python benchmarks/bench_fsdp.py --only memory-limit --add --json benchmarks/results/fsdp.json

mlp, gpt, gpt-small-batch (6, 25 and 6 minutes): each block is a unit, and the model around them.
Torch's FSDP2 and DDP are measured with their option sets, and the fastest ones become opponents, as
does our own DDP. Fresh processes run in rounds of one run per side, every other round in reversed
order, 2 ranks x 1 thread, ours over the backend "trireme", torch's over Gloo. Both sides of a ratio
step with the same AdamW: fused, or, where that makes FSDP2 faster, foreach.

engine (4 minutes): the time that sharding adds to a step of 64 units of 4 small parameters, beside
what torch's adds over Gloo, and over its fake process group (harness/engine_cost.py).

With --path all-gather (mlp, gpt-small-batch and engine; 4, 5 and 3 minutes) ours is over Gloo, too,
where it gathers parameters as torch's does; what sharding adds is compared over the fake group,
where nothing is moved and time is CPU time.

    python benchmarks/bench_fsdp.py --path all-gather --json benchmarks/results/fsdp_gathered.json

memory (4 minutes): what a host holds between two steps, as in bench_zero.py.

memory-limit (7 minutes): the widest `mlp` that 2 ranks train for three steps without ever taking
more than 2 GiB beyond what they held before they built it (harness/peak_memory.py).

A target is met when the median of the paired ratios is at or below it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
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
from harness.engine_cost import measure_engine_cost
from harness.exit_codes import exit_code
from harness.fresh_run import run_fresh
from harness.host_memory import measure_host_memory
from harness.memory_report import NO_SYNC, WORKLOAD_NAMES, measure_memory
from harness.pairs import OURS, TORCH, TORCH_VIEW, Side, measure_all
from harness.peak_memory import measure_peak, widest_fitting
from harness.reducer_overhead import Overhead
from harness.stats import PairedRatio
from harness.step_runs import BESIDE, FULL, QUICK, Contest, Effort, StepRuns
from harness.table import table

# Against torch's FSDP2, and against torch's DDP.
STEP_TARGETS = {"mlp": (0.20, 0.58), "gpt-small-batch": (0.31, 0.80), "gpt": (0.78, 1.00)}
DDP_TARGET = 1.0  # our own
ENGINE_TARGETS = {"gloo": 0.2, "fake": 0.5}
PARTS = (*STEP_TARGETS, "engine", "memory", "memory-limit")
GATHERED_TARGETS = {"mlp": 0.85, "gpt-small-batch": 0.85}
GATHERED_ENGINE_TARGET = 0.25
GATHERED_PARTS = (*GATHERED_TARGETS, "engine")

KEPT = {"reshard_after_forward": False}
FSDP = Side("fsdp", "fsdp", {})
FSDP_FOREACH = Side("fsdp, foreach", "fsdp", {}, "torch-foreach")
FSDP_OWN_ADAM = Side("fsdp, trireme.optim", "fsdp", {}, "trireme")
TORCH_FSDP = (
    Side("torch-fsdp2", "torch-fsdp2", {}),
    Side("torch-fsdp2, kept", "torch-fsdp2", KEPT),
    Side("torch-fsdp2, foreach", "torch-fsdp2", {}, "torch-foreach"),
    Side("torch-fsdp2, kept, foreach", "torch-fsdp2", KEPT, "torch-foreach"),
)
GATHERED = (
    Side("fsdp, Gloo", "fsdp-gloo", {}),
    Side("fsdp, Gloo, kept", "fsdp-gloo", KEPT),
    Side("fsdp, Gloo, foreach", "fsdp-gloo", {}, "torch-foreach"),
    Side("fsdp, Gloo, kept, foreach", "fsdp-gloo", KEPT, "torch-foreach"),
)
DDP = OURS["shm"]
ZERO_1 = Side("zero1", "zero1", {})
ZERO_2 = Side("zero2", "zero2", {})

TORCH_ENGINES = {
    "gloo": TORCH_FSDP[:2],
    "fake": tuple(
        Side(f"{side.label}, fake group", side.strategy, side.options) for side in TORCH_FSDP[:2]
    ),
}
GATHERED_FAKE = tuple(
    Side(f"{side.label}, fake group", side.strategy, side.options) for side in GATHERED[:2]
)
ENGINE_BLOCKS = 3  # in place of a full run's: these steps are slow

# With the name under which the estimate knows what its ranks hold.
MEMORY_SIDES = ((FSDP, "fsdp"), (TORCH_FSDP[0], "fsdp"), (NO_SYNC, "ddp"))

LIMIT_SIDES = (TORCH_VIEW, DDP, ZERO_1, ZERO_2, FSDP, TORCH_FSDP[0])
LIMIT_MIB = 2048.0
WIDTHS = range(1024, 3073, 64)
QUICK_WIDTHS = range(256, 385, 64)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 1 if the estimate of memory is off,
    2 wrong options, 3 a rank failed."""
    parser = bench_parser(__doc__, PARTS)
    let_add(parser)
    parser.add_argument("--path", choices=("host", "all-gather"), default="host")
    arguments = parser.parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    effort = QUICK if arguments.quick else FULL
    gathers = arguments.path == "all-gather"
    if gathers and arguments.only == ",".join(PARTS):
        arguments.only = ",".join(GATHERED_PARTS)
    parts = chosen_parts("bench_fsdp", arguments.only, GATHERED_PARTS if gathers else PARTS)
    earlier = earlier_results("bench_fsdp", arguments)
    results = begin_results(arguments.quick)
    for part in parts:
        if part == "engine":
            results["engine"] = (bench_gathered_engine if gathers else bench_engine)(effort)
        elif gathers:
            results["workloads"][part] = bench_gathered(part, effort)
        elif part == "memory":
            workloads = WORKLOAD_NAMES[: 1 if arguments.quick else None]
            results["memory"] = measure_memory(
                "bench_fsdp", workloads, MEMORY_SIDES, measure_host_memory
            )
        elif part == "memory-limit":
            results["memory_limit"] = bench_memory_limit(
                QUICK_WIDTHS if arguments.quick else WIDTHS
            )
        else:
            results["workloads"][part] = bench_workload(part, effort)
    if arguments.json is not None:
        write_added(arguments.json, results, earlier, parts)
    return 0 if all(row["estimate_agrees"] for row in results.get("memory", [])) else 1


def bench_workload(name: str, effort: Effort) -> dict[str, Any]:
    """Measures and prints one workload; returns its part of the JSON."""
    print(f"{name}: {effort.steps} steps after warm-up in fresh processes", flush=True)
    runs = StepRuns(lambda side: run_fresh(side, name, effort.steps))
    runs.add((*BESIDE, *TORCH, *TORCH_FSDP, ZERO_1, ZERO_2, FSDP_OWN_ADAM), repeats=1)
    fsdp2, ddp = runs.fastest(TORCH_FSDP), runs.fastest(TORCH)
    against_fsdp2, against_ddp = STEP_TARGETS[name]
    alike = FSDP if fsdp2.optimizer == FSDP.optimizer else FSDP_FOREACH
    opponents = [(alike, fsdp2, against_fsdp2), (FSDP, ddp, against_ddp), (FSDP, DDP, DDP_TARGET)]
    contests = runs.contests(opponents, effort.pairs)
    runs.print_with(contests)
    return {
        "torch_best": ddp.label,
        "torch_fsdp2_best": fsdp2.label,
        "contests": [asdict(contest) for contest in contests],
        "runs": runs.to_json(),
    }


def bench_gathered(name: str, effort: Effort) -> dict[str, Any]:
    """Measures a workload where ours gathers."""
    print(f"{name}, all-gather: {effort.steps} steps after warm-up in fresh processes", flush=True)
    runs = StepRuns(lambda side: run_fresh(side, name, effort.steps))
    runs.add((*BESIDE, *TORCH_FSDP, *GATHERED), repeats=1)
    theirs = runs.fastest(TORCH_FSDP)
    ours = runs.fastest([side for side in GATHERED if side.optimizer == theirs.optimizer])
    contests = runs.contests([(ours, theirs, GATHERED_TARGETS[name])], effort.pairs)
    runs.print_with(contests)
    return {
        "torch_fsdp2_best": theirs.label,
        "contests": [asdict(contest) for contest in contests],
        "runs": runs.to_json(),
    }


def bench_gathered_engine(effort: Effort) -> dict[str, Any]:
    """Measures and prints what gathered units cost the CPU; returns its part of the JSON."""
    print("engine: 64 units of 4 parameters, fake group", flush=True)
    blocks = max(1, effort.blocks // ENGINE_BLOCKS)
    measure = partial(measure_engine_cost, blocks=blocks, fake=True)
    pairs = list(zip(GATHERED_FAKE, TORCH_ENGINES["fake"], strict=True))
    runs = measure_all([side for pair in pairs for side in pair], effort.pairs, measure)
    added = {label: [run.added_ms for run in found] for label, found in runs.items()}
    contests = [
        Contest(
            ours.label,
            theirs.label,
            PairedRatio.of(added[ours.label], added[theirs.label], GATHERED_ENGINE_TARGET),
        )
        for ours, theirs in pairs
    ]
    return _print_engine(contests, runs)


def bench_engine(effort: Effort) -> dict[str, Any]:
    """Measures and prints what units cost; returns its part of the JSON."""

    def measure(side: Side) -> Overhead:
        blocks = max(1, effort.blocks // ENGINE_BLOCKS)
        return measure_engine_cost(side, blocks, fake=side in TORCH_ENGINES["fake"])

    print("engine: 64 units of 4 parameters", flush=True)
    both = [side for sides in TORCH_ENGINES.values() for side in sides]
    runs = measure_all(both, 1, measure)
    best = {
        kind: min(sides, key=lambda side: runs[side.label][0].added_ms)
        for kind, sides in TORCH_ENGINES.items()
    }
    rounds = measure_all((FSDP, *best.values()), effort.pairs, measure)
    for label, found in rounds.items():
        runs[label] = runs.get(label, []) + found
    added = {label: [run.added_ms for run in found] for label, found in rounds.items()}
    contests = []
    for kind, side in best.items():
        ratio = PairedRatio.of(added[FSDP.label], added[side.label], ENGINE_TARGETS[kind])
        contests.append(Contest(FSDP.label, side.label, ratio))
    return _print_engine(contests, runs)


def _print_engine(contests: Sequence[Contest], runs: dict[str, list[Overhead]]) -> dict[str, Any]:
    print(table(["", "runs", "bare ms", "sharded ms", "added ms"], _engine_rows(runs)))
    for contest in contests:
        print(f"added time, {contest.ours} / {contest.theirs}:")
        print("\n".join("  " + line for line in contest.ratio.lines()))
    print(flush=True)
    return {
        "contests": [asdict(contest) for contest in contests],
        "runs": {label: [asdict(run) for run in found] for label, found in runs.items()},
    }


def _engine_rows(runs: dict[str, list[Overhead]]) -> list[list[str]]:
    rows = []
    for label, found in runs.items():
        names = ("bare_ms", "wrapped_ms", "added_ms")
        medians = [statistics.median(getattr(run, name) for run in found) for name in names]
        rows.append([label, str(len(found)), *(f"{median:.2f}" for median in medians)])
    return rows


def bench_memory_limit(widths: Sequence[int]) -> dict[str, Any]:
    """Finds and prints the widest `mlp` of every side; returns its part of the JSON."""
    print(f"memory limit: mlp, 2 ranks, {LIMIT_MIB:.0f} MiB", flush=True)
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
