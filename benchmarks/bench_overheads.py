"""What strategies add to steps that compute and send next to nothing.

    python benchmarks/bench_overheads.py --json benchmarks/results/overheads.json

reducer (4 minutes): what DistributedDataParallel adds to a step of 1,000 parameters of 64 elements,
over torch's fake process group, beside torch's class (measure/reducer_overhead.py).

units (4 minutes): what fully_shard adds to a step of 64 units of 4 small parameters, on the memory
of a host, beside torch's over Gloo and over its fake group (measure/engine_cost.py).

gathered-units (3 minutes): the same where ours gathers parameters, too, both over the fake group,
where nothing is moved and time is CPU time.

replicas (1 minute): what a call of a Linear(8, 8) takes longer through 2 replicas, against 150 us
or three wake-ups of a thread on this machine, whichever is more (measure/replica_overhead.py).

python (1 minute): the share of a step that is Python under DataParallel and in one process, and the
bytes that a step copies so that replicas are like the module (measure/replica_steps.py). On the CPU
these bytes are none.

Sides run in rounds of fresh processes, odd rounds reversed. A target is met when the median of the
paired ratios is at or below it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from measure.bench_options import run_in_parts
from measure.engine_cost import measure_engine_cost
from measure.fresh_run import RANKS
from measure.reducer_overhead import Overhead, measure_overhead
from measure.replica_overhead import measure_replica_overhead
from measure.replica_steps import measure_replica_steps
from measure.sides import DDP_GLOO, DP, FSDP, FSDP_GLOO, ONE_PROCESS, TORCH_DDP, TORCH_FSDP2, Side
from measure.stats import PairedRatio
from measure.step_runs import FULL, QUICK, Contest, Effort, measure_all
from measure.table import table

REDUCER_TARGET = 0.5
UNIT_TARGETS = {"gloo": 0.2, "fake": 0.5}
GATHERED_UNITS_TARGET = 0.25
WAKE_UPS, ENOUGH_US = 3, 150.0
PYTHON_WORKLOADS = ("mlp", "gpt", "narrow", "trees")
UNIT_BLOCKS = 3  # one block of these slow steps is measured where others have so many

Measure = Callable[[Side], Overhead]


def _over_fake_group(side: Side) -> Side:
    return replace(side, label=f"{side.label}, fake group")


# Those with the fused optimizer, of which none is stepped here.
TORCH_UNITS = {"gloo": TORCH_FSDP2[:2], "fake": tuple(map(_over_fake_group, TORCH_FSDP2[:2]))}
GATHERED_UNITS = tuple(map(_over_fake_group, FSDP_GLOO[:2]))


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    return run_in_parts("bench_overheads", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    results[part] = PARTS[part](QUICK if quick else FULL)
    return True


def bench_reducer(effort: Effort) -> dict[str, Any]:
    """Measures and prints the reducer's own cost; returns its part of the JSON."""
    measure = partial(measure_overhead, world=RANKS, blocks=effort.blocks)
    runs = measure_all(TORCH_DDP, 1, measure)
    best = _cheapest(TORCH_DDP, runs)
    return _contests([(DDP_GLOO, best, REDUCER_TARGET)], runs, effort, measure)


def bench_units(effort: Effort) -> dict[str, Any]:
    """Measures and prints what units cost; returns its part of the JSON."""
    measure = _unit_cost(effort)
    runs = measure_all([side for sides in TORCH_UNITS.values() for side in sides], 1, measure)
    opponents = [
        (FSDP, _cheapest(sides, runs), UNIT_TARGETS[group]) for group, sides in TORCH_UNITS.items()
    ]
    return _contests(opponents, runs, effort, measure)


def bench_gathered_units(effort: Effort) -> dict[str, Any]:
    """Measures and prints what gathered units cost the CPU; returns its part of the JSON."""
    pairs = zip(GATHERED_UNITS, TORCH_UNITS["fake"], strict=True)
    opponents = [(ours, theirs, GATHERED_UNITS_TARGET) for ours, theirs in pairs]
    return _contests(opponents, {}, effort, _unit_cost(effort))


def bench_replicas(effort: Effort) -> dict[str, Any]:
    """Measures and prints what a small call takes longer; returns its part of the JSON."""
    runs = [measure_replica_overhead(effort.blocks) for _ in range(effort.rounds)]
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


def bench_python(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints the share of Python and what is copied; returns its part of the JSON."""
    found = []
    for workload in PYTHON_WORKLOADS:
        for side in (DP, ONE_PROCESS):
            steps = measure_replica_steps(side, workload, effort.steps)
            row = {"workload": workload, "side": side.label, **asdict(steps)}
            copied = max(steps.copied_bytes, default=0)
            found.append(row | {"python_share": steps.python_share, "most_copied": copied})
    rows = [
        [
            f"{row['workload']}, {row['side']}",
            *(f"{row[f'{who}_ms']:.2f}" for who in ("step", "caller_python", "replica_python")),
            f"{row['python_share']:.1%}",
            str(row["most_copied"]),
        ]
        for row in found
    ]
    header = ["ms under the profiler", "step", "Python, caller", "Python, replicas", "share"]
    print(table([*header, "bytes copied"], rows), "\n", flush=True)
    return found


def _unit_cost(effort: Effort) -> Measure:
    blocks = max(1, effort.blocks // UNIT_BLOCKS)

    def measure(side: Side) -> Overhead:
        return measure_engine_cost(side, blocks, fake=side.label.endswith("fake group"))

    return measure


def _cheapest(sides: Sequence[Side], runs: Mapping[str, Sequence[Overhead]]) -> Side:
    return min(sides, key=lambda side: _median(runs[side.label], "added_ms"))


def _contests(
    opponents: Sequence[tuple[Side, Side, float]],
    runs: dict[str, list[Overhead]],
    effort: Effort,
    measure: Measure,
) -> dict[str, Any]:
    """Measures opponents in rounds, prints them below earlier `runs`, and returns all of them."""
    sides = {side.label: side for ours, theirs, _ in opponents for side in (ours, theirs)}
    rounds = measure_all(list(sides.values()), effort.rounds, measure)
    added = {label: [run.added_ms for run in found] for label, found in rounds.items()}
    contests = [
        Contest(a.label, b.label, PairedRatio.of(added[a.label], added[b.label], target))
        for a, b, target in opponents
    ]
    for label, found in rounds.items():
        runs[label] = runs.get(label, []) + found
    quantities = ("bare_ms", "wrapped_ms", "added_ms")
    rows = [
        [label, str(len(found)), *(f"{_median(found, name):.3f}" for name in quantities)]
        for label, found in runs.items()
    ]
    print(table(["", "runs", "bare ms", "wrapped ms", "added ms"], rows))
    for contest in contests:
        print(f"added time, {contest.ours} / {contest.theirs}:")
        print("\n".join("  " + line for line in contest.ratio.lines()))
    print(flush=True)
    return {
        "contests": [asdict(contest) for contest in contests],
        "runs": {label: [asdict(run) for run in found] for label, found in runs.items()},
    }


def _median(runs: Sequence[Overhead], quantity: str) -> float:
    return statistics.median(getattr(run, quantity) for run in runs)


PARTS: Mapping[str, Callable[[Effort], Any]] = {
    "reducer": bench_reducer,
    "units": bench_units,
    "gathered-units": bench_gathered_units,
    "replicas": bench_replicas,
    "python": bench_python,
}


if __name__ == "__main__":
    sys.exit(main())
