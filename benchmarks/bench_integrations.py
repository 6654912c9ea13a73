"""Steps of Lightning's Trainer, Accelerate and Transformers' Trainer, with Trireme and without.

    python benchmarks/bench_integrations.py --json benchmarks/results/integrations.json
    python benchmarks/bench_integrations.py --only accelerate --quick

Each part (5 minutes) trains `mlp` and `gpt-small-batch` on 2 ranks of one thread by the library's
loop: with the library's defaults on the CPU, which are torch's DDP over Gloo, and with the classes
of trireme.integrations. It needs the libraries that scripts/integration_tools.txt lists.

Sides run in rounds of fresh processes, odd rounds reversed. A target is met when the median of the
paired ratios is at or below it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure.bad_input import BadInput
from measure.bench_options import run_in_parts
from measure.framework_steps import FRAMEWORKS, FrameworkCase
from measure.fresh_run import RANKS
from measure.ranks import Launch, RankGroup
from measure.stats import PairedRatio
from measure.step_runs import FULL, QUICK, Effort

TARGETS = {"mlp": 0.75, "gpt-small-batch": 0.85}  # the defaults' time counts as 1


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options or a library is not
    installed, 3 a rank failed."""
    return run_in_parts("bench_integrations", __doc__, list(FRAMEWORKS), _bench, command_line)


def _bench(framework: str, quick: bool, results: dict[str, Any]) -> bool:
    if find_spec(framework) is None:
        raise BadInput(
            "bench_integrations",
            f"got no installed {framework}, expected one",
            "Run: pip install -r scripts/integration_tools.txt",
        )
    effort = QUICK if quick else FULL
    results[framework] = {
        "steps": {workload: bench_steps(framework, workload, effort) for workload in TARGETS}
    }
    return True


def bench_steps(framework: str, workload: str, effort: Effort) -> dict[str, Any]:
    """Measures and prints one workload; returns its part of the JSON."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(effort.rounds):
        for ours in (True, False) if number % 2 == 0 else (False, True):
            times[ours].append(step_ms(FrameworkCase(framework, ours, workload, effort.steps)))
    ratio = PairedRatio.of(times[True], times[False], TARGETS[workload])
    medians = {ours: statistics.median(found) for ours, found in times.items()}
    print(f"{framework}, {workload}: {medians[True]:.1f} ms; by default {medians[False]:.1f} ms")
    print("\n".join(ratio.lines()), flush=True)
    return {"ours_ms": times[True], "default_ms": times[False], "ratio": ratio.to_json()}


def step_ms(case: FrameworkCase) -> float:
    """The mean over ranks of their median step, in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch(
            case.framework, "measure.framework_steps", case.to_json(), RANKS, 1, Path(scratch)
        )
        with RankGroup(launch) as group:
            return statistics.fmean(reply["step_ms"] for reply in group.replies())


if __name__ == "__main__":
    sys.exit(main())
