"""Step times of one workload: sides measured one after the other, then two of them in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.fresh_run import RunTimes
from harness.machine import cores
from harness.pairs import Side, measure_all, measure_pairs
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
        """Of sides that were measured, the one with the least median step."""
        return min(sides, key=lambda side: self._median(side.label, "step_ms"))

    def pair(self, ours: Side, theirs: Side, count: int, target: float) -> PairedRatio:
        """The ratio of their steps in `count` pairs, which also are runs."""
        pairs = measure_pairs(ours, theirs, count, self._measure)
        self._keep(ours.label, pairs.ours)
        self._keep(theirs.label, pairs.theirs)
        return PairedRatio.of(
            [run.step_ms for run in pairs.ours], [run.step_ms for run in pairs.theirs], target
        )

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
