"""Interleaving: the runs take turns of a few steps, so that a busy minute hits them all.

Every run keeps its processes and its own training trajectory; while one has its turn the others
sleep.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from measure.progress import Progress
from measure.ranks import Message, RankGroup
from measure.worker import StepRecord

WARM_UP_STEPS = 5
TURN_S = 4.0
FEWEST_ROUNDS = 5


@dataclass
class Trajectory:
    """All steps of one run: `ranks[r][i]` is step i on rank r. The first five are warm-up."""

    ranks: list[list[StepRecord]]
    memory: list[dict[str, float]] = field(default_factory=list)

    def mean(self, quantity: str, first: int = WARM_UP_STEPS) -> list[float]:
        """The mean over ranks of one field of StepRecord, for every step from `first` on.

        Batches of ranks are equally large, so the mean of their losses is the loss of the global
        batch.
        """
        values = [[getattr(step, quantity) for step in rank[first:]] for rank in self.ranks]
        return [statistics.fmean(step) for step in zip(*values, strict=True)]

    def losses(self) -> list[float]:
        return self.mean("loss", first=0)

    @property
    def steps(self) -> int:
        return len(self.ranks[0])


@dataclass(frozen=True)
class Extent:
    """How long to go on after warm-up: `steps` if given, else until the clock reads `deadline`."""

    steps: int | None
    deadline: float


class Rounds:
    """Runs all groups in turns. `trajectories` grows with every turn."""

    def __init__(self, groups: Mapping[str, RankGroup], progress: Progress) -> None:
        self._groups = groups
        self.progress = progress
        self._expected_steps = WARM_UP_STEPS
        self.trajectories = {name: Trajectory([[]] * g.launch.world) for name, g in groups.items()}

    def run(self, extent: Extent) -> None:
        """Warm-up, then whole rounds, so that all runs end at the same step; then memory."""
        names = list(self._groups)
        for name in names:
            self._turn(name, WARM_UP_STEPS)
        left = self._steps_left(extent)
        turn = max(1, min(round(TURN_S / self._slowest_step_s()), left // FEWEST_ROUNDS))
        rounds = 0
        while left > 0:
            self._expected_steps = self._steps_done() + left
            first = rounds % len(names)
            for name in names[first:] + names[:first]:
                self._turn(name, min(turn, left))
            rounds += 1
            left = self._steps_left(extent)
        for name, group in self._groups.items():
            self.trajectories[name].memory = [
                reply["memory"] for reply in group.ask({"do": "measure"})
            ]

    def _turn(self, name: str, count: int) -> None:
        trajectory = self.trajectories[name]

        def show(tick: Message) -> None:
            self.progress.step(name, tick["tick"], self._expected_steps, tick["loss"])

        replies = self._groups[name].ask({"do": "steps", "count": count}, show)
        new = [[StepRecord(**record) for record in reply["records"]] for reply in replies]
        trajectory.ranks = [old + more for old, more in zip(trajectory.ranks, new, strict=True)]
        step_ms = statistics.median(trajectory.mean("step_ms", first=-count))
        self.progress.round(name, trajectory.steps, trajectory.losses()[-1], step_ms)

    def _steps_done(self) -> int:
        return min(trajectory.steps for trajectory in self.trajectories.values())

    def _steps_left(self, extent: Extent) -> int:
        """Steps that every run can still take; at least one round is run after warm-up."""
        done = self._steps_done() - WARM_UP_STEPS
        if extent.steps is not None:
            return extent.steps - done
        seconds_per_step = sum(self._step_s(name) for name in self._groups)
        fitting = int((extent.deadline - time.monotonic()) / seconds_per_step)
        return max(fitting, 0 if done else FEWEST_ROUNDS)

    def _step_s(self, name: str) -> float:
        first = -min(self.trajectories[name].steps, 2 * WARM_UP_STEPS)
        return statistics.fmean(self.trajectories[name].mean("step_ms", first)) / 1e3

    def _slowest_step_s(self) -> float:
        return max(self._step_s(name) for name in self._groups)
