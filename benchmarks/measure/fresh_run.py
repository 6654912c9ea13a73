"""One measurement: processes are started, warmed up, timed and ended."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from workloads import WORKLOADS, WorkloadOptions

from measure.ranks import Launch, RankGroup
from measure.rounds import WARM_UP_STEPS, Trajectory
from measure.sides import Side
from measure.strategies import STRATEGIES
from measure.worker import RankConfig, StepRecord

RANKS = 2


@dataclass(frozen=True)
class RunTimes:
    """Medians over the timed steps of the mean over ranks; the highest peak of a rank."""

    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    faults_per_step: float
    peak_rss_mib: float


@contextmanager
def fresh_ranks(side: Side, workload: str, ranks: int = RANKS) -> Iterator[RankGroup]:
    """Processes that have built `side` and wait for commands (worker.py); each has a batch."""
    with starting_ranks(side, workload, ranks) as group:
        group.replies()
        yield group


def rank_config(
    side: Side, workload: str, ranks: int, workload_options: WorkloadOptions | None = None
) -> RankConfig:
    """What each process of `side` is told, on the batch of `ranks` ranks."""
    options = workload_options or WorkloadOptions()
    return RankConfig(
        strategy=side.strategy,
        workload=workload,
        global_batch=WORKLOADS[workload](options).rows_per_rank * ranks,
        threads=STRATEGIES[side.strategy].processes(ranks)[1],
        options=dict(side.options),
        optimizer=side.optimizer,
        workload_options=options,
    )


@contextmanager
def starting_ranks(
    side: Side, workload: str, ranks: int, workload_options: WorkloadOptions | None = None
) -> Iterator[RankGroup]:
    """Processes that are about to build `side`, and reply when they have."""
    world, threads = STRATEGIES[side.strategy].processes(ranks)
    config = rank_config(side, workload, ranks, workload_options)
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch("bench", "measure.worker", config.to_json(), world, threads, Path(scratch))
        with RankGroup(launch) as group:
            yield group


def run_fresh(side: Side, workload: str, steps: int) -> RunTimes:
    """Warm-up and `steps` timed steps: 2 ranks x 1 thread, or one process."""
    with fresh_ranks(side, workload) as group:
        timed = group.ask({"do": "steps", "count": WARM_UP_STEPS + steps})
        held = group.ask({"do": "measure"})
    ranks = [[StepRecord(**record) for record in reply["records"]] for reply in timed]
    trajectory = Trajectory(ranks)

    def median(quantity: str) -> float:
        return statistics.median(trajectory.mean(quantity))

    return RunTimes(
        step_ms=median("step_ms"),
        forward_ms=median("forward_ms"),
        backward_ms=median("backward_ms"),
        optimizer_ms=median("optimizer_ms"),
        faults_per_step=median("faults"),
        peak_rss_mib=max(reply["memory"]["peak_rss"] for reply in held),
    )
