"""The step time of every strategy beside torch's, and beside one process with the same cores.

    python benchmarks/bench_steps.py --json benchmarks/results/steps.json
    python benchmarks/bench_steps.py --only mlp --quick

Workloads (workloads.py says what they are): mlp, gpt-small-batch, gpt, narrow and trees, of 15, 20,
30, 5 and 5 minutes. First every side runs once. The fastest option set of each of torch's classes
becomes the opponent, then the sides that meet run in seven rounds, in fresh processes, odd rounds
reversed, with one process of 2 threads and with ranks that never talk beside them. A side has 2
ranks (or replicas) of one thread; ours are over the backend "trireme" unless "Gloo" is said,
torch's over Gloo. Both sides of a ratio step with the same AdamW: fused, or, where torch's class is
faster with that, foreach. Under fully_shard each block of a model is a unit.

A target is met when the median of the paired ratios ours / theirs is at or below it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from measure import sides
from measure.bench_options import run_in_parts
from measure.fresh_run import run_fresh
from measure.sides import DDP, DP, FSDP, TORCH_DDP, TORCH_FSDP2, TORCH_VIEW, ZERO_1, ZERO_2, Side
from measure.stats import verdict
from measure.step_runs import FULL, QUICK, Effort, Match, StepRuns

ALONE = (sides.ONE_PROCESS, sides.NO_SYNC)
FSDP_AS_TORCHS = (FSDP, sides.FSDP_FOREACH)

MATCHES: Mapping[str, Sequence[Match]] = {
    "mlp": (
        Match([DDP], TORCH_DDP, 0.65),
        Match([sides.DDP_GLOO], TORCH_DDP, 1.0),
        Match([ZERO_1], [DDP], 0.9),
        Match([ZERO_2], TORCH_DDP, 0.58),
        Match(FSDP_AS_TORCHS, TORCH_FSDP2, 0.20),
        Match([FSDP], TORCH_DDP, 0.58),
        Match([FSDP], [DDP], 1.0),
        Match(sides.FSDP_GLOO, TORCH_FSDP2, 0.85),
        Match([DP], [DDP], 1.05),
    ),
    "gpt-small-batch": (
        Match([DDP], TORCH_DDP, 0.75),
        Match([sides.DDP_GLOO], TORCH_DDP, 1.0),
        Match([ZERO_2], TORCH_DDP, 0.8),
        Match(FSDP_AS_TORCHS, TORCH_FSDP2, 0.31),
        Match([FSDP], TORCH_DDP, 0.8),
        Match([FSDP], [DDP], 1.0),
        Match(sides.FSDP_GLOO, TORCH_FSDP2, 0.85),
    ),
    "gpt": (
        Match([DDP], TORCH_DDP, 0.98),
        Match([ZERO_2], TORCH_DDP, 1.0),
        Match(FSDP_AS_TORCHS, TORCH_FSDP2, 0.78),
        Match([FSDP], TORCH_DDP, 1.0),
        Match([FSDP], [DDP], 1.0),
        Match([DP], [DDP], 1.05),
    ),
    "narrow": (Match([DP], [sides.ONE_PROCESS], 0.75),),
    "trees": (
        Match([DDP], [sides.ONE_PROCESS], 0.65),
        Match([ZERO_2], [sides.ONE_PROCESS], 0.65),
        Match([DDP], TORCH_DDP, 1.0),
    ),
}

# Measured once, beside those that meet: other ways to step, and torch's ZeRO.
ONCE: Mapping[str, Sequence[Side]] = {
    "mlp": (
        *sides.TORCH_ZERO_1,
        sides.ZERO_2_OWN_ADAM,
        sides.ZERO_2_FUSED_STEP,
        sides.ZERO_2_GLOO,
        sides.FSDP_OWN_ADAM,
    ),
    "gpt": (*sides.TORCH_ZERO_1, ZERO_1, sides.FSDP_OWN_ADAM),
    "narrow": (*TORCH_DDP, DDP),
    "trees": (DP,),
}
ONCE = {"gpt-small-batch": (*ONCE["mlp"], ZERO_1), **ONCE}
EFFORTS = {"gpt": replace(FULL, steps=10)}  # a step of it takes a second
MEMORY_TARGET = 1.0


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    return run_in_parts("bench_steps", __doc__, list(MATCHES), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    results["workloads"][part] = bench_workload(part, QUICK if quick else EFFORTS.get(part, FULL))
    return True


def bench_workload(name: str, effort: Effort) -> dict[str, Any]:
    """Measures and prints one workload; returns its part of the JSON."""
    print(f"{name}: {effort.steps} steps after warm-up in fresh processes", flush=True)
    matches = MATCHES[name]
    runs = StepRuns(lambda side: run_fresh(side, name, effort.steps))
    met = [side for match in matches for side in (*match.ours, *match.theirs)]
    runs.add(list({side.label: side for side in (*ALONE, *met, *ONCE[name])}.values()), 1)
    contests = runs.contests(matches, ALONE, effort.rounds)
    runs.print_with(contests)
    found = {
        "torch_best": runs.fastest(TORCH_DDP).label,
        "contests": [asdict(contest) for contest in contests],
        "runs": runs.to_json(),
    }
    if DDP in met:
        found["memory"] = _peak_ratio(runs)
    return found


def _peak_ratio(runs: StepRuns) -> dict[str, Any]:
    """Compares the peak memory of a rank under our DDP with torch's leanest option set."""
    peaks = [
        statistics.median(run.peak_rss_mib for run in runs.by_label[side.label])
        for side in (DDP, TORCH_VIEW)
    ]
    ratio = peaks[0] / peaks[1]
    found = {"ratio": ratio, "target": MEMORY_TARGET, "verdict": verdict(ratio, MEMORY_TARGET)}
    print(f"peak memory of a rank, {DDP.label} / {TORCH_VIEW.label}: {ratio:.3f}\n", flush=True)
    return {"ours": DDP.label, "theirs": TORCH_VIEW.label, **found}


if __name__ == "__main__":
    sys.exit(main())
