"""What checkpoints and offload cost a step, and what a step holds, in fresh processes.

Run as a process (`python -m measure.activation_runs CONFIG`) it does what CONFIG says and replies.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import Gpt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from workloads import WORKLOADS, Batch, WorkloadOptions

from measure.machine import cores
from measure.memory import keep_heap_warm, written_mib
from measure.peak_memory import watching
from measure.ranks import Launch, RankGroup
from measure.reducer_overhead import medians_of_blocks
from measure.worker import take_over_stdout

WIDTH, ROWS = 8, 16
WARM_UP_STEPS = 2
OFFLOADS = ("memory", "folder")
PEAK_DEPTH = 24
M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 64 << 10

Call = Callable[..., Any]


@dataclass(frozen=True)
class CallCost:
    """us of one Linear(8, 8): its forward, its step, and its step in a checkpoint of each library;
    and how many Python functions such a checkpoint calls."""

    forward: float
    plain: float
    ours: float
    torchs: float
    python_calls: int
    torchs_python_calls: int

    def added(self, step: float) -> float:
        """What a checkpointed step takes beyond a plain one and a second forward."""
        return step - self.plain - self.forward


@dataclass(frozen=True)
class OffloadTimes:
    """ms of each step by side; the bytes that leave memory in one, and ms to copy as many there and
    back."""

    steps: dict[str, list[float]]
    bytes: dict[str, int]
    copies: dict[str, list[float]]


@dataclass(frozen=True)
class PeakMemory:
    """MiB that a step took at its fullest moment, and what was told beforehand."""

    measured: float
    planned: float


def measure_calls(blocks: int) -> CallCost:
    """Measures with one thread and `blocks` blocks of ten steps."""
    with _started({"do": "calls", "blocks": blocks}, threads=1) as group:
        return CallCost(**group.replies()[0])


def measure_steps(workload: str, rounds: int, tiny: bool = False) -> dict[str, list[float]]:
    """ms of each step of a workload: "plain", and with each block in a checkpoint of "ours" or of
    "torch"."""
    config = {"do": "steps", "workload": workload, "rounds": rounds, "tiny": tiny}
    with _started(config, threads=cores()) as group:
        times: dict[str, list[float]] = group.replies()[0]
        return times


def measure_offload(folder: Path, rounds: int, tiny: bool = False) -> OffloadTimes:
    """The same of `gpt`, "plain" and with what its blocks save in "memory" or in a "folder"."""
    config = {"do": "offload", "folder": str(folder), "rounds": rounds, "tiny": tiny}
    with _started(config, threads=cores()) as group:
        return OffloadTimes(**group.replies()[0])


def measure_peak(checkpoint: str, tiny: bool = False) -> PeakMemory:
    """Trains a step of `gpt` with 24 blocks: "never", "sqrt" or "auto" at half of the former.

    Gradients are there before, as in every step but the first. malloc gives all blocks above 64 KiB
    back as they are freed, so that what is measured is what was held.
    """
    with _started({"do": "peak", "checkpoint": checkpoint, "tiny": tiny}, cores()) as group:
        (planned,) = group.replies()
        (process,) = group.processes
        before = written_mib(process)
        with watching(group.processes) as watch:
            group.ask({"do": "step"})
    return PeakMemory(watch.peak_mib - before, planned["mib"])


@contextmanager
def _started(config: Mapping[str, Any], threads: int) -> Iterator[RankGroup]:
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        name, text = "activation", json.dumps(config)
        launch = Launch(name, "measure.activation_runs", text, 1, threads, Path(scratch))
        with RankGroup(launch) as group:
            yield group


def _ours() -> Call:
    import trireme

    return trireme.checkpoint


def _calls(config: Mapping[str, Any]) -> CallCost:
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    ours = partial(_ours(), linear)
    torchs = partial(torchs_checkpoint, linear, use_reentrant=False)
    steps: dict[str, Callable[[], object]] = {
        "forward": partial(linear, x),
        "plain": partial(_backward, linear, x),
        "ours": partial(_backward, ours, x),
        "torchs": partial(_backward, torchs, x),
    }
    us = {name: 1e3 * ms for name, ms in medians_of_blocks(steps, config["blocks"]).items()}
    python = {name: python_calls(step) for name, step in steps.items()}
    plain = python["plain"] + python["forward"]
    return CallCost(
        **us,
        python_calls=python["ours"] - plain,
        torchs_python_calls=python["torchs"] - plain,
    )


def python_calls(step: Callable[[], object]) -> int:
    """How many functions written in Python a step calls."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def _backward(call: Call, x: Tensor) -> None:
    call(x).sum().backward()


class Job:
    """A workload whose blocks are called as `use` was told last."""

    def __init__(self, workload: str, tiny: bool) -> None:
        job = WORKLOADS[workload](WorkloadOptions(tiny=tiny))
        self.model, self.loss = job.model(), job.loss
        self.batch: Batch = job.samples().rows(torch.arange(job.rows_per_rank))
        self.blocks: Sequence[nn.Module] = list(self.model.blocks)  # type: ignore[arg-type]

    def use(self, call: Call | None) -> None:
        """Each block is called by itself, or by `call(block, x)`."""
        for block in self.blocks:
            plain = partial(type(block).forward, block)
            block.forward = plain if call is None else partial(call, plain)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.loss(self.model(self.batch.inputs), self.batch).backward()


def _steps(config: Mapping[str, Any]) -> dict[str, list[float]]:
    job = Job(config["workload"], config["tiny"])
    sides = {
        "plain": None,
        "ours": _ours(),
        "torch": partial(torchs_checkpoint, use_reentrant=False),
    }
    return _times_of(job, sides, config["rounds"])


def _times_of(job: Job, sides: Mapping[str, Call | None], rounds: int) -> dict[str, list[float]]:
    """ms of a step of each side per round, odd rounds reversed."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-WARM_UP_STEPS, rounds):
        for name in sides if number % 2 == 0 else reversed(sides):
            job.use(sides[name])
            taken = _ms(job.step)
            if number >= 0:
                times[name].append(taken)
    return times


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _offload(config: Mapping[str, Any]) -> OffloadTimes:
    import trireme

    job = Job("gpt", config["tiny"])
    folder: str = config["folder"]
    costs = trireme.measure_activations(job.model, job.batch.inputs, layers=job.blocks)
    saved = sum(cost.bytes for cost in costs[:-1])
    sides = {
        "plain": None,
        "memory": partial(trireme.checkpoint, offload=True),
        "folder": partial(trireme.checkpoint, offload=folder),
    }
    steps = _times_of(job, sides, config["rounds"])
    return OffloadTimes(
        steps=steps,
        # On the CPU the memory of the host is where tensors are: none moves.
        bytes={"memory": 0, "folder": saved},
        copies={
            "memory": [0.0] * config["rounds"],
            "folder": [_copied_ms(folder, saved) for _ in range(config["rounds"])],
        },
    )


def _copied_ms(folder: str, count: int) -> float:
    """ms to write that many bytes to a new mapped file in the folder, and to read them back."""
    held = torch.ones(count, dtype=torch.uint8)
    back = torch.ones(count, dtype=torch.uint8)
    with tempfile.NamedTemporaryFile(dir=folder) as file:

        def there_and_back() -> None:
            mapped = torch.from_file(file.name, shared=True, size=count, dtype=torch.uint8)
            mapped.copy_(held)
            back.copy_(mapped)

        return _ms(there_and_back)


def _peak(config: Mapping[str, Any]) -> tuple[float, Callable[[], None]]:
    """MiB that are planned, and the step."""
    import trireme
    from trireme.activation_estimate import measure_model

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    job = WORKLOADS["gpt"](WorkloadOptions(tiny=config["tiny"]))
    batch = job.samples().rows(torch.arange(job.rows_per_rank))
    model = _deep_gpt(config["tiny"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    measured = measure_model(model, batch.inputs)
    never = measured.estimate("never").bytes
    checkpoint, budget = config["checkpoint"], None
    of_blocks: dict[str, Any] = {}
    if checkpoint == "auto":
        budget = never // 2
        outside = measured.outside.bytes + measured.outside.output_bytes
        of_blocks["budget_bytes"] = budget - outside
    planned = measured.estimate(checkpoint, budget)
    blocks = list(model.blocks)

    def step(rows: int = len(batch.inputs)) -> None:
        tokens = batch.inputs[:rows]
        x = model.tokens(tokens) + model.positions.weight[: tokens.shape[1]]
        segments = 1 if checkpoint == "never" else checkpoint
        x = trireme.checkpoint_sequential(blocks, segments, x, **of_blocks)
        logits = model.head(model.norm(x))
        job.loss(logits, Batch(tokens, batch.targets[:rows])).backward()

    step(1)  # threads, and what libraries keep for themselves
    return planned.bytes / 2**20, step


def _deep_gpt(tiny: bool) -> Gpt:
    """The model of `gpt` with 24 blocks."""
    shallow = WORKLOADS["gpt"](WorkloadOptions(tiny=tiny)).model()
    assert isinstance(shallow, Gpt)
    vocabulary, width = shallow.tokens.weight.shape
    length = shallow.positions.weight.shape[0]
    return Gpt(vocabulary, width, PEAK_DEPTH, shallow.blocks[0].heads, length)  # type: ignore


def main() -> None:
    replies = take_over_stdout()
    config = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a forked process has read it before
    torch.manual_seed(0)

    def reply(message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    if config["do"] == "peak":
        planned, step = _peak(config)
        reply({"mib": planned})
        sys.stdin.readline()
        step()
        reply({"done": True})
    else:
        keep_heap_warm()
        measures = {"calls": _calls, "steps": _steps, "offload": _offload}
        found = measures[config["do"]](config)  # type: ignore[operator]
        reply(found if isinstance(found, dict) else asdict(found))
    sys.stdin.readline()


if __name__ == "__main__":
    main()
