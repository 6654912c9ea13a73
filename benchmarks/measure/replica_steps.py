"""How much of a step is Python, and what DataParallel copies to keep its replicas up to date.

A few steps of a workload are trained under torch's profiler. Python is what remains

* of the calling thread's time, without operators, nodes of the graph (a backward of replicas is
  one) and the wait for the forwards of the replicas;
* of those forwards, without operators: the code of the module, and waiting for other threads to
  let go of the interpreter.

The profiler takes time of its own on both sides of the line, so this is a share to look at, not one
to judge by.

Run as a rank (`python -m measure.replica_steps CONFIG`) it measures once and replies.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from workloads import WorkloadOptions

from measure.fresh_run import rank_config
from measure.ranks import Launch, RankGroup
from measure.rounds import WARM_UP_STEPS
from measure.sides import Side
from measure.strategies import STRATEGIES
from measure.worker import RankConfig, Trainer, take_over_stdout

RANKS = 2
STEP = "bench::step"
OPERATORS = ("aten::",)
COMPUTING = ("aten::", "autograd::engine::")


@dataclass(frozen=True)
class ReplicaSteps:
    """ms per profiled step, mean over replicas; for all steps, warm-up too, what was copied.

    `own_bytes`: what each replica holds for itself. A side without replicas has none of either.
    """

    step_ms: float
    caller_python_ms: float
    replica_python_ms: float
    copied_bytes: list[int]
    own_bytes: list[int]

    @property
    def python_share(self) -> float:
        return (self.caller_python_ms + self.replica_python_ms) / self.step_ms


def measure_replica_steps(
    side: Side, workload: str, steps: int, options: WorkloadOptions | None = None
) -> ReplicaSteps:
    """In a fresh process, on the batch of 2 ranks. `side` runs as one process."""
    config = rank_config(side, workload, RANKS, options)
    text = json.dumps({"config": config.to_json(), "steps": steps})
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch("steps", "measure.replica_steps", text, 1, config.threads, Path(scratch))
        with RankGroup(launch) as group:
            (reply,) = group.replies()
    return ReplicaSteps(**reply)


@dataclass(frozen=True)
class _Report:
    """What DataParallel says of a step. Of a plain module: nothing."""

    waited_ms: float
    replicas_ms: list[float]
    copied_bytes: list[int]
    own_bytes: list[int]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Report:
        last_step: Callable[[], dict[str, Any]] = getattr(module, "last_step", dict)
        said = last_step()
        if not said:
            return cls(0.0, [], [], [])
        replicas = said["replicas"]
        return cls(
            said["forward_ms"],
            [replica["forward_ms"] for replica in replicas],
            [said["copied_bytes"]],
            [replica["memory_bytes"] for replica in replicas],
        )


def _measure(trainer: Trainer, steps: int) -> ReplicaSteps:
    reports = []

    def step(number: int) -> None:
        batch = trainer.samples.rows(trainer.order.indices(number))
        with record_function(STEP):
            trainer.loss(trainer.parallel.module(batch.inputs), batch).backward()
            trainer.parallel.optimizer.step()
            trainer.parallel.optimizer.zero_grad(set_to_none=True)
        reports.append(_Report.of(trainer.parallel.module))

    for number in range(WARM_UP_STEPS):
        step(number)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(WARM_UP_STEPS, WARM_UP_STEPS + steps):
            step(number)
    taken = times_of(profiler.events())
    profiled = reports[WARM_UP_STEPS:]
    waited = sum(report.waited_ms for report in profiled)
    forwards = sum(sum(report.replicas_ms) for report in profiled)
    replicas = max(1, len(profiled[-1].replicas_ms))
    return ReplicaSteps(
        step_ms=taken.step_ms / steps,
        caller_python_ms=(taken.step_ms - taken.caller_ms - waited) / steps,
        replica_python_ms=(forwards - taken.others_ms) / replicas / steps,
        copied_bytes=[copied for report in reports for copied in report.copied_bytes],
        own_bytes=profiled[-1].own_bytes,
    )


@dataclass(frozen=True)
class Times:
    """ms of all steps; of what the calling thread computed in them; of other threads' operators
    that belong to no backward."""

    step_ms: float
    caller_ms: float
    others_ms: float


def times_of(events: Iterable[Any]) -> Times:
    """Reads a profile of steps that one thread has begun."""
    threads: defaultdict[int, list[Any]] = defaultdict(list)
    steps = []
    for event in events:
        if event.name == STEP:
            steps.append(event)
        elif event.name.startswith(COMPUTING):
            threads[event.thread].append(event)
    caller = threads.pop(steps[0].thread, [])
    spans = [(step.time_range.start, step.time_range.end) for step in steps]
    inside = [
        event
        for event in caller
        if any(begin <= event.time_range.start < end for begin, end in spans)
    ]
    return Times(
        step_ms=sum(end - begin for begin, end in spans) / 1e3,
        caller_ms=_outermost_ms(inside, COMPUTING),
        others_ms=sum(_outermost_ms(found, OPERATORS) for found in threads.values()),
    )


def _outermost_ms(events: Sequence[Any], names: tuple[str, ...]) -> float:
    """Returns one thread's time in events that are in no other one and have one of `names`."""
    total, covered_until = 0.0, float("-inf")
    for event in sorted(events, key=lambda one: (one.time_range.start, -one.time_range.end)):
        begin, end = event.time_range.start, event.time_range.end
        if begin < covered_until:
            continue
        covered_until = end
        if event.name.startswith(names):
            total += end - begin
    return total / 1e3


def main() -> None:
    replies = take_over_stdout()
    argument = json.loads(sys.argv[1])
    config = RankConfig.from_json(argument["config"])
    torch.set_num_threads(config.threads)
    trainer = Trainer(config, STRATEGIES[config.strategy])
    replies.write(json.dumps(asdict(_measure(trainer, argument["steps"]))) + "\n")
    sys.stdin.readline()


if __name__ == "__main__":
    main()
