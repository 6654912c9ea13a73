"""Step times of one workload: sides measured one after the other, then some in paired rounds.

In a round every side runs once, in fresh processes, and odd rounds are reversed: the rounds of two
sides are A-B, B-A, A-B, ..., so that drift and order cancel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from measure.fresh_run import RunTimes
from measure.machine import cores
from measure.sides import ONE_PROCESS, Side, Sides
from measure.stats import PairedRatio
from measure.table import table

Result = TypeVar("Result")


@dataclass(frozen=True)
class Effort:
    """How much is measured. A quick run is for looking, not for judging."""

    rounds: int
    steps: int
    blocks: int


FULL = Effort(rounds=7, steps=20, blocks=30)
QUICK = Effort(rounds=2, steps=5, blocks=5)


@dataclass(frozen=True)
class Contest:
    """Labels of two sides, and the ratio of their steps."""

    ours: str
    theirs: str
    ratio: PairedRatio


@dataclass(frozen=True)
class Match:
    """The fastest of `ours` is to take at most `target` of the time of the fastest of `theirs`.

    Of `ours` those are asked that step with the optimizer of the fastest of `theirs`.
    """

    ours: Sides
    theirs: Sides
    target: float


class StepRuns:
    """The runs of one workload, which `measure` makes in fresh processes."""

    def __init__(self, measure: Callable[[Side], RunTimes]) -> None:
        self._measure = measure
        self.by_label: dict[str, list[RunTimes]] = {}

    def add(self, sides: Sides, rounds: int) -> dict[str, list[RunTimes]]:
        """Measures every side once per round and returns these runs by label."""
        found = measure_all(sides, rounds, self._measure)
        for label, runs in found.items():
            self.by_label[label] = self.by_label.get(label, []) + runs
        return found

    def contests(self, matches: Sequence[Match], beside: Sides, rounds: int) -> list[Contest]:
        """Measures the fastest sides of each match in rounds, and those `beside` with them."""
        pairs = [(*self._opponents(match), match.target) for match in matches]
        sides = {side.label: side for ours, theirs, _ in pairs for side in (ours, theirs)}
        sides |= {side.label: side for side in beside}
        found = self.add(list(sides.values()), rounds)
        steps = {label: [run.step_ms for run in runs] for label, runs in found.items()}
        return [
            Contest(a.label, b.label, PairedRatio.of(steps[a.label], steps[b.label], target))
            for a, b, target in pairs
        ]

    def fastest(self, sides: Sides) -> Side:
        """Returns the side, of those measured, with the least median step."""
        return min(sides, key=lambda side: self._median(side.label, "step_ms"))

    def _opponents(self, match: Match) -> tuple[Side, Side]:
        theirs = self.fastest(match.theirs)
        return self.fastest([s for s in match.ours if s.optimizer == theirs.optimizer]), theirs

    def print_with(self, contests: Sequence[Contest]) -> None:
        """The table, and under it every ratio."""
        print(self.table())
        for contest in contests:
            print(f"step time, {contest.ours} / {contest.theirs}:")
            print("\n".join("  " + line for line in contest.ratio.lines()))
        print(flush=True)

    def table(self) -> str:
        """A row per side, medians over its runs."""
        rows = []
        for label, found in self.by_label.items():
            phases = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
            threads = f" x {cores()} threads" if label == ONE_PROCESS.label else ""
            rows.append(
                [
                    label + threads,
                    str(len(found)),
                    *(f"{self._median(label, phase):.1f}" for phase in phases),
                    f"{self._median(label, 'faults_per_step'):.0f}",
                    f"{self._median(label, 'peak_rss_mib'):.0f}",
                ]
            )
        header = ["", "runs", "step ms", "forward", "backward", "optimizer", "faults/step"]
        return table([*header, "peak MiB/rank"], rows)

    def to_json(self) -> dict[str, Any]:
        return {label: [asdict(run) for run in found] for label, found in self.by_label.items()}

    def _median(self, label: str, quantity: str) -> float:
        return statistics.median(getattr(run, quantity) for run in self.by_label[label])


def measure_all(
    sides: Sides, rounds: int, measure: Callable[[Side], Result]
) -> dict[str, list[Result]]:
    """Measures every side once per round, odd rounds reversed; returns the results by label."""
    found: dict[str, list[Result]] = {side.label: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else list(reversed(sides)):
            found[side.label].append(measure(side))
    return found
