"""Horovod's API of Trireme beside what it stands on, on 2 ranks of one thread.

    python benchmarks/bench_horovod.py --json benchmarks/results/horovod.json
    python benchmarks/bench_horovod.py --only allreduce --quick

steps (2 minutes): a step with DistributedOptimizer beside one under our DistributedDataParallel.

many (1 minute): what DistributedOptimizer adds to a backward of 1,000 parameters of 64 elements,
beside what DistributedDataParallel adds.

allreduce (1 minute): hvd.allreduce_ beside torch.distributed.all_reduce, on the backend trireme.
Small tensors may take some microseconds longer, since ranks agree on what comes next before they
move it.

names (1 minute): 200 tensors of 1 KiB, named in opposite orders on the ranks, beside the same
order.

Both sides run in the same processes, in alternating order, over several sets of fresh processes. A
target is met when the median of the paired ratios is at or below it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measure.bench_options import run_in_parts
from measure.horovod_rounds import HorovodCase, measure_horovod
from measure.stats import PairedRatio

KIB, MIB = 1 << 10, 1 << 20
STEP_TARGETS = {"mlp": 1.05, "gpt-small-batch": 1.05}
MANY_TARGET = 1.3
# Microseconds that are allowed beside the all_reduce of torch.distributed, or a factor of its time.
ALLREDUCE_TARGETS = {4: (20.0, 1.0), MIB: (0.0, 1.15), 25 * MIB: (0.0, 1.15)}
NAMES_TARGET = 2.0

Times = dict[str, list[float]]


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    return run_in_parts("bench_horovod", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    results[part] = PARTS[part](quick)
    return True


def bench_steps(quick: bool) -> dict[str, Any]:
    """Measures and prints steps; returns their part of the JSON."""
    return {workload: _bench_step(workload, quick) for workload in STEP_TARGETS}


def _bench_step(workload: str, quick: bool) -> dict[str, Any]:
    times = _times("steps", workload, quick, calls=3 if quick else 5)
    target = STEP_TARGETS[workload]
    return _judged(workload, times, "horovod", "ddp", target, times["horovod"], times["ddp"])


def bench_many(quick: bool) -> dict[str, Any]:
    """Measures and prints what is added to small gradients; returns its part of the JSON."""
    times = _times("many", "", quick, calls=10)
    added = {
        name: [wrapped - bare for wrapped, bare in zip(times[name], times["bare"], strict=True)]
        for name in ("horovod", "ddp")
    }
    what = "added to 1,000 parameters"
    return _judged(what, times, "horovod", "ddp", MANY_TARGET, added["horovod"], added["ddp"])


def bench_allreduce(quick: bool) -> dict[str, Any]:
    """Measures and prints single tensors; returns their part of the JSON."""
    return {str(size): _bench_size(size, quick) for size in ALLREDUCE_TARGETS}


def _bench_size(size: int, quick: bool) -> dict[str, Any]:
    times = _times("allreduce", str(size), quick, calls=0)
    more_us, factor = ALLREDUCE_TARGETS[size]
    allowed = [us + more_us for us in times["all_reduce"]]
    what = f"{size} bytes" + (f", {more_us:g} us more allowed" if more_us else "")
    return _judged(what, times, "horovod", "all_reduce", factor, times["horovod"], allowed)


def bench_names(quick: bool) -> dict[str, Any]:
    """Measures and prints orders of names; returns its part of the JSON."""
    times = _times("names", "", quick, calls=5)
    what = "200 names"
    return _judged(what, times, "opposite", "same", NAMES_TARGET, times["opposite"], times["same"])


def _times(kind: str, what: str, quick: bool, calls: int) -> Times:
    case = HorovodCase(kind, what, rounds=2 if quick else 5, calls=calls)
    parts = [measure_horovod(case) for _ in range(1 if quick else 3)]
    return {name: [us for part in parts for us in part[name]] for name in parts[0]}


def _judged(
    what: str,
    times: Times,
    ours: str,
    theirs: str,
    target: float,
    own: Sequence[float],
    allowed: Sequence[float],
) -> dict[str, Any]:
    ratio = PairedRatio.of(own, allowed, target)
    medians = ", ".join(f"{name} {statistics.median(us):.1f} us" for name, us in times.items())
    print(f"{what}: {medians}; {ours} / {theirs}:")
    print("\n".join("  " + line for line in ratio.lines()), flush=True)
    return {"times_us": times, "ratio": ratio.to_json()}


PARTS: Mapping[str, Callable[[bool], Any]] = {
    "steps": bench_steps,
    "many": bench_many,
    "allreduce": bench_allreduce,
    "names": bench_names,
}


if __name__ == "__main__":
    sys.exit(main())
