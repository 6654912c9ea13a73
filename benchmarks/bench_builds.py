"""Two builds of Trireme beside each other: has a change of the code cost time?

    python benchmarks/bench_builds.py --before FOLDER --before-commit 4fdb7e2 --json FILE

FOLDER holds another build's package `trireme`, with real files (cp -rL). Both builds, and torch's
class with its fastest options, are measured in one run, in fresh processes that take turns, odd
rounds reversed. Per part: what is measured of DistributedDataParallel (fully_shard in `engine`).

    mlp, gpt-small-batch   the step and the first backward, 2 ranks x 1 thread, shared memory
    overhead               what a reducer adds to a step of 1,000 parameters (reducer_overhead.py)
    engine                 what sharding adds to a step of 64 units (engine_cost.py)

A target is met where the median of the paired ratios now / before is at most 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from measure.bench_options import begin_results, bench_parser, chosen_parts
from measure.engine_cost import measure_engine_cost
from measure.exit_codes import exit_code
from measure.fresh_run import RANKS, fresh_ranks
from measure.reducer_overhead import measure_overhead
from measure.results import write_results
from measure.rounds import WARM_UP_STEPS, Trajectory
from measure.sides import DDP, DDP_GLOO, FSDP, TORCH_FSDP2, TORCH_VIEW, Side
from measure.stats import PairedRatio, spread
from measure.step_runs import FULL, QUICK, Effort
from measure.table import table
from measure.worker import StepRecord

STEPS = ("mlp", "gpt-small-batch")
PARTS = (*STEPS, "overhead", "engine")
BUILDS = ("before", "now")
TARGET = 1.0

Quantities = dict[str, float]


@dataclass(frozen=True)
class Part:
    """What is measured of whom."""

    ours: Side
    theirs: Side
    measure: Callable[[Side], Quantities]


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    parser = bench_parser(__doc__, PARTS)
    parser.add_argument("--before", type=Path, required=True, help="folder of the other package")
    parser.add_argument("--before-commit", required=True, help="what it was built from")
    arguments = parser.parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    effort = QUICK if arguments.quick else FULL
    chosen = chosen_parts("bench_builds", arguments.only, PARTS)
    results = begin_results(arguments.quick)
    results["before"] = arguments.before_commit
    parts = parts_of(effort)
    for name in chosen:
        results["workloads"][name] = bench_part(name, parts[name], effort, arguments.before)
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


def parts_of(effort: Effort) -> Mapping[str, Part]:
    """All parts, measured with so much effort."""

    def overhead(side: Side) -> Quantities:
        return {"added ms": measure_overhead(side, RANKS, effort.blocks).added_ms}

    def engine(side: Side) -> Quantities:
        return {"added ms": measure_engine_cost(side, max(1, effort.blocks // 3)).added_ms}

    steps = {
        name: Part(DDP, TORCH_VIEW, partial(measure_steps, name, effort.steps)) for name in STEPS
    }
    return {
        **steps,
        "overhead": Part(DDP_GLOO, TORCH_VIEW, overhead),
        "engine": Part(FSDP, TORCH_FSDP2[0], engine),
    }


def measure_steps(workload: str, steps: int, side: Side) -> Quantities:
    """The median step after warm-up, and the first backward of all, which learns the plan."""
    with fresh_ranks(side, workload) as group:
        timed = group.ask({"do": "steps", "count": WARM_UP_STEPS + steps})
    run = Trajectory([[StepRecord(**record) for record in reply["records"]] for reply in timed])
    return {
        "step ms": statistics.median(run.mean("step_ms")),
        "first backward ms": run.mean("backward_ms", first=0)[0],
    }


def bench_part(name: str, part: Part, effort: Effort, before: Path) -> dict[str, Any]:
    """Measures and prints a part; returns what the JSON has of it."""
    sides = dict.fromkeys(BUILDS, part.ours) | {"torch": part.theirs}
    found: dict[str, list[Quantities]] = {label: [] for label in sides}
    for number in range(effort.rounds):
        for label in sides if number % 2 == 0 else reversed(sides):
            with build_of(before if label == "before" else None):
                found[label].append(part.measure(sides[label]))
    quantities = list(found["now"][0])
    rows = [
        [label, *(f"{statistics.median(run[name] for run in runs):.3f}" for name in quantities)]
        for label, runs in found.items()
    ]
    print(f"{name}: {part.ours.label}, torch's is {part.theirs.label}")
    print(table(["", *quantities], rows))
    result: dict[str, Any] = {"torch": part.theirs.label, "runs": found}
    for quantity in quantities:
        values = {label: [run[quantity] for run in runs] for label, runs in found.items()}
        ratios = {
            "now / before": PairedRatio.of(values["now"], values["before"], TARGET),
            "now / torch": PairedRatio.of(values["now"], values["torch"], TARGET),
            "before / torch": PairedRatio.of(values["before"], values["torch"], TARGET),
        }
        for label, ratio in ratios.items():
            print(f"{quantity}, {label}: " + ratio.lines()[-1], flush=True)
        result[quantity] = {
            "spread": {label: spread(run) for label, run in values.items()},
            "ratios": {label: ratio.to_json() for label, ratio in ratios.items()},
        }
    print(flush=True)
    return result


@contextmanager
def build_of(folder: Path | None) -> Iterator[None]:
    """Processes that are started meanwhile import `trireme` from `folder`, if that is given."""
    if folder is None:
        yield
        return
    chosen = {
        "PYTHONPATH": str(folder),
        # The loader looks there before it looks where the library was built.
        "LD_LIBRARY_PATH": str(folder / "trireme" / "lib"),
    }
    kept = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    sys.exit(main())
