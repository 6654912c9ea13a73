"""Measures pipelines in fresh ranks: all sides live in the same processes and take turns.

Ours is over shared memory, torch's over Gloo. "1 thread" and "2 threads" are rank 0 alone with the
whole model and the same micro-batches, while the others sleep. So are pipelines in one process.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from workloads import WORKLOADS, WorkloadOptions

from measure.memory import keep_heap_warm
from measure.ranks import Launch, RankGroup
from measure.stages import Layers, Loss, cut, loss_of, torch_stages, torch_step
from measure.worker import take_over_stdout

THREADS = 2  # a pipeline in one process has a row on each
LAYERS = 8  # every number of stages divides it
WARM_UP_ROUNDS = 3
TOLERANCE = 1e-4

Step = Callable[[], Any]
Times = dict[str, list[float]]


@dataclass(frozen=True)
class PipelineJob:
    """A model as layers, and one batch of it."""

    layers: Layers
    inputs: Tensor
    targets: Tensor
    loss: Loss
    chunks: int

    def copies(self) -> Layers:
        """Layers with parameters of their own."""
        return copy.deepcopy(self.layers)


@dataclass(frozen=True)
class StepTimes:
    """`times`: ms of each round's step by side. `chunks`: micro-batches. `bubbles`: by schedule,
    those of the last step of ours, measured and computed, the mean over ranks. `live`: the most
    micro-batches on each rank."""

    times: Times
    chunks: int
    bubbles: dict[str, tuple[float, float]]
    live: dict[str, list[int]]


def measure_steps(
    workload: str, schedules: Sequence[str], ranks: int, rounds: int, tiny: bool = False
) -> StepTimes:
    """Measures steps of "ours S" and "torch S" for each schedule S, and of one process."""
    config = {
        "do": "steps",
        "workload": workload,
        "schedules": list(schedules),
        "rounds": rounds,
        "tiny": tiny,
    }
    replies = _run(config, ranks)
    times = {
        name: [max(of_ranks) for of_ranks in zip(*(r["times"][name] for r in replies), strict=True)]
        for name in replies[0]["times"]
    }
    bubbles, live = {}, {}
    for name in schedules:
        reports = [reply["reports"][name] for reply in replies]
        bubbles[name] = (
            sum(report["bubble"] for report in reports) / ranks,
            sum(report["computed_bubble"] for report in reports) / ranks,
        )
        live[name] = [sum(stage["peak_live"] for stage in report["stages"]) for report in reports]
    return StepTimes(times, replies[0]["chunks"], bubbles, live)


def measure_threads(workload: str, rounds: int, tiny: bool = False) -> Times:
    """ms of each round's step in one process, a row on each of two threads: "step" with 1f1b,
    "pass" by its forward and a backward outside; "torchgpipe, 1 thread" and "torchgpipe, 2 threads"
    that operators have. Beside them "ranks": 1f1b on two; and one process without a pipeline."""
    replies = _run({"do": "threads", "workload": workload, "rounds": rounds, "tiny": tiny}, 2)
    ranks = [reply["ranks"] for reply in replies]
    times: Times = {**replies[0], "ranks": [max(of_both) for of_both in zip(*ranks, strict=True)]}
    return times


def measure_messages(size: int, rounds: int) -> Times:
    """us of one message of `size` bytes between two ranks, "ours" and "torch", half of a round
    trip; and of one "copy" of as many bytes."""
    times: Times = _run({"do": "messages", "size": size, "rounds": rounds}, 2)[0]
    return times


def _run(config: Mapping[str, Any], ranks: int) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        text = json.dumps(config)
        launch = Launch("pipeline", "measure.pipeline_runs", text, ranks, 1, Path(scratch))
        with RankGroup(launch) as group:
            return group.replies()


def job_of(workload: str, tiny: bool) -> PipelineJob:
    """The workload cut between its blocks; "linear" has layers of Linear(8, 8)."""
    if workload == "linear":
        layers = [nn.Linear(8, 8) for _ in range(LAYERS)]
        x, y = torch.randn(64, 8), torch.randn(64, 8)
        return PipelineJob(Layers(layers), x, y, nn.functional.mse_loss, 32)
    chunks, rows = {"mlp": (8, 32), "gpt-small-batch": (4, 4), "gpt": (8, 16)}[workload]
    made = WORKLOADS[workload](WorkloadOptions(tiny=tiny))
    model, batch = made.model(), made.samples().rows(torch.arange(rows))
    return PipelineJob(cut(model), batch.inputs, batch.targets, loss_of(made.loss), chunks)


class _Sides:
    """Makes a step of each side; every one trains a copy of the layers."""

    def __init__(self, job: PipelineJob) -> None:
        self.job = job
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.gloo = dist.new_group(backend="gloo")

    def ours(self, schedule: str) -> Any:
        import trireme

        job = self.job
        value = trireme.pipeline_schedule(schedule, ranks=self.ranks, micro_batches=job.chunks)
        return trireme.Pipeline(
            nn.Sequential(*job.copies().layers),
            job.chunks,
            ranks=True,
            schedule=value,
            balance=job.layers.balance(value.stages),
            loss=job.loss,
        )

    def torchs(self, schedule: str, stage_rank: Sequence[int]) -> Callable[[], float | None]:
        """The loss comes back on the rank of the last stage."""
        job = self.job
        stages = torch_stages(job.copies(), stage_rank, self.gloo)
        run = torch_step(stages, schedule, job.chunks, job.loss)

        def step() -> float | None:
            for stage in stages:
                stage.submod.zero_grad()
            loss = run(job.inputs, job.targets)
            return None if loss is None else loss.item()

        return step

    def on_threads(self) -> Any:
        """A pipeline in this process."""
        import trireme

        job = self.job
        return trireme.Pipeline(
            nn.Sequential(*job.copies().layers),
            job.chunks,
            schedule="1f1b",
            balance=job.layers.balance(THREADS),
            loss=job.loss,
        )

    def torchgpipe(self) -> nn.Module:
        from torchgpipe import GPipe  # it cuts alike; nothing is recomputed

        job = self.job
        module: nn.Module = GPipe(
            nn.Sequential(*job.copies().layers),
            job.layers.balance(THREADS),
            devices=["cpu"] * THREADS,
            chunks=job.chunks,
            checkpoint="never",
        )
        return module

    def whole(self, module: nn.Module, threads: int = 1) -> Callable[[], float]:
        """Steps of a module that cuts the batch itself, with the loss outside."""
        job = self.job

        def step() -> float:
            torch.set_num_threads(threads)
            module.zero_grad()
            loss = job.loss(module(job.inputs), job.targets)
            loss.backward()
            torch.set_num_threads(1)
            return loss.item()

        return step

    def alone(self, threads: int) -> Callable[[], float]:
        job, model = self.job, nn.Sequential(*self.job.copies().layers)
        x, y = job.inputs.tensor_split(job.chunks), job.targets.tensor_split(job.chunks)

        def step() -> float:
            torch.set_num_threads(threads)
            model.zero_grad()
            total = torch.zeros(())
            for inputs, targets in zip(x, y, strict=True):
                loss = job.loss(model(inputs), targets)
                loss.backward()
                total += loss.detach()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= job.chunks
            torch.set_num_threads(1)
            return float(total / job.chunks)

        return step


def _steps(config: Mapping[str, Any]) -> dict[str, Any]:
    sides = _Sides(job_of(config["workload"], config["tiny"]))
    pipes = {name: sides.ours(name) for name in config["schedules"]}
    steps: dict[str, Step] = {}
    for name, pipe in pipes.items():
        steps[f"ours {name}"] = _ours_step(pipe, sides.job)
        steps[f"torch {name}"] = sides.torchs(name, [stage.rank for stage in pipe.stages])
    _add_alone(steps, sides)
    times = _in_turns(steps, config["rounds"], sides.gloo)
    reports = {name: pipe.last_step() for name, pipe in pipes.items()}
    return {"times": times, "chunks": sides.job.chunks, "reports": reports}


def _threads(config: Mapping[str, Any]) -> Times:
    sides = _Sides(job_of(config["workload"], config["tiny"]))
    steps: dict[str, Step] = {"ranks": _ours_step(sides.ours("1f1b"), sides.job)}
    if sides.rank == 0:
        steps["step"] = _ours_step(sides.on_threads(), sides.job)
        steps["pass"] = sides.whole(sides.on_threads())
        for threads in (1, 2):
            others = sides.whole(sides.torchgpipe(), threads)
            steps[f"torchgpipe, {_count(threads)}"] = others
    else:
        names = ("step", "pass", "torchgpipe, 1 thread", "torchgpipe, 2 threads")
        steps |= dict.fromkeys(names, lambda: None)
    _add_alone(steps, sides)
    return _in_turns(steps, config["rounds"], sides.gloo)


def _count(threads: int) -> str:
    return f"{threads} thread{'s'[: threads - 1]}"


def _add_alone(steps: dict[str, Step], sides: _Sides) -> None:
    for threads in (1, 2):
        alone = sides.alone(threads)
        steps[_count(threads)] = alone if sides.rank == 0 else lambda: None


def _in_turns(steps: Mapping[str, Step], rounds: int, gloo: dist.ProcessGroup) -> Times:
    """Times steps, whose losses are the same."""
    times: Times = {name: [] for name in steps}
    expected = None
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name in steps if number % 2 == 0 else reversed(list(steps)):
            dist.barrier(gloo)
            begin = time.perf_counter()
            loss = steps[name]()
            taken = (time.perf_counter() - begin) * 1e3
            if number >= 0:
                times[name].append(taken)
            if loss is None:
                continue
            expected = loss if expected is None else expected
            if abs(loss - expected) > TOLERANCE * abs(expected):
                raise RuntimeError(f"{name} has the loss {loss}, expected {expected}")
    return times


def _ours_step(pipe: Any, job: PipelineJob) -> Callable[[], float]:
    def step() -> float:
        pipe.zero_grad()
        return float(pipe.step(job.inputs, target=job.targets))

    return step


def _messages(config: Mapping[str, Any]) -> Times:
    from trireme import _C
    from trireme._core.group_communicator import communicator_of

    rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
    group = dist.group.WORLD
    assert group is not None
    channels = _C.TensorChannels(communicator_of(group), [(0, 1, 2, "there"), (1, 0, 2, "back")])
    given, taken = torch.randn(config["size"] // 4), torch.empty(config["size"] // 4)
    place = 0

    def ours() -> None:
        nonlocal place
        place += 1
        for edge in (0, 1):
            if edge == rank:
                channels.send(edge, (0, place), "", [given])
            else:
                channels.receive(edge, (0, place))

    def torchs() -> None:
        for sender in (0, 1):
            if sender == rank:
                dist.send(given, 1 - rank, group=gloo)
            else:
                dist.recv(taken, 1 - rank, group=gloo)

    def copies() -> None:
        if rank == 0:
            taken.copy_(given)
            given.copy_(taken)

    each = max(1, (4 << 20) // config["size"])  # short messages are timed together
    sides = {"ours": ours, "torch": torchs, "copy": copies}
    times: Times = {name: [] for name in sides}
    for number in range(-WARM_UP_ROUNDS, config["rounds"]):
        for name in sides if number % 2 == 0 else reversed(sides):
            dist.barrier(gloo)
            begin = time.perf_counter()
            for _ in range(each):
                sides[name]()
            us = (time.perf_counter() - begin) * 1e6 / each / 2
            if number >= 0:
                times[name].append(us)
    return times


DO: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "messages": _messages,
    "steps": _steps,
    "threads": _threads,
}


def main() -> None:
    replies = take_over_stdout()
    config = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a forked process has read it before
    torch.manual_seed(0)
    keep_heap_warm()
    import trireme  # noqa: F401  # registers the backend

    dist.init_process_group("trireme")
    found = DO[config["do"]](config)
    replies.write(json.dumps(found) + "\n")
    sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
