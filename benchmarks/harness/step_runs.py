"""Step times of one workload: sides measured one after the other, then some in paired rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.fresh_run import RunTimes
from harness.machine import cores
from harness.pairs import Side, measure_all
from harness.stats import PairedRatio
from harness.table import table

BESIDE = (Side("1 process", "single", {}), Side("2 ranks, no sync", "no-sync", {}))


@dataclass(frozen=True)
class Effort:
    """How much is measured. A quick run is for looking, not for judging."""

    pairs: int
    repeats: int
    steps: int
    blocks: int


FULL = Effort(pairs=7, repeats=2, steps=20, blocks=30)
QUICK = Effort(pairs=2, repeats=1, steps=5, blocks=5)


@dataclass(frozen=True)
class Contest:
    """Labels of two sides, and the ratio of their steps."""

    ours: str
    theirs: str
    ratio: PairedRatio


class StepRuns:
    """The runs of one workload, which `measure` makes in fresh processes."""

    def __init__(self, measure: Callable[[Side], RunTimes]) -> None:
        self._measure = measure
        self.by_label: dict[str, list[RunTimes]] = {}

    def add(self, sides: Sequence[Side], repeats: int) -> None:
        """Measures every side `repeats` times."""
        for label, found in measure_all(sides, repeats, self._measure).items():
            self._keep(label, found)

    def fastest(self, sides: Sequence[Side]) -> Side:
        """Returns the side, of those measured, with the least median step."""
        return min(sides, key=lambda side: self._median(side.label, "step_ms"))

    def contests(self, opponents: Sequence[tuple[Side, Side, float]], rounds: int) -> list[Contest]:
        """The ratios of ours / theirs against a target, from rounds in which every side runs once.

        Odd rounds are reversed, so that of one pair the rounds are A-B, B-A, A-B, ...
        """
        sides = {side.label: side for ours, theirs, _ in opponents for side in (ours, theirs)}
        found = measure_all(list(sides.values()), rounds, self._measure)
        for label, runs in found.items():
            self._keep(label, runs)
        steps = {label: [run.step_ms for run in runs] for label, runs in found.items()}
        return [
            Contest(a.label, b.label, PairedRatio.of(steps[a.label], steps[b.label], target))
            for a, b, target in opponents
        ]

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
            threads = f" x {cores()} threads" if label == BESIDE[0].label else ""
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

    def _keep(self, label: str, found: list[RunTimes]) -> None:
        self.by_label[label] = self.by_label.get(label, []) + found

    def _median(self, label: str, quantity: str) -> float:
        return statistics.median(getattr(run, quantity) for run in self.by_label[label])
