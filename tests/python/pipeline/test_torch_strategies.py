"""Strategies over stages: our schedules average once per step; torch's never do so wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.optim import SGD

from harness.faults import HOUSE_FORM, raises
from harness.on_ranks import on_shm_ranks
from pipeline.ranks import rows
from pipeline.torch_programs import (
    CPU,
    MICRO_BATCHES,
    OURS,
    SINGLE,
    TORCHS,
    V_SHAPED,
    Block,
    count_of,
    own_numbers,
)

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
PIPELINES, COPIES = 2, 2


def in_ddp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return trireme.DistributedDataParallel(module, process_group=group)


def sharded(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    trireme.fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    return module


class Copy:
    """One of two pipelines of two ranks; the ranks of a stage have an optimizer in common, or the
    modules of it are wrapped."""

    def __init__(self, name: str, rank: int, wrap: Any = None) -> None:
        self.place, self.number = rank % PIPELINES, rank // PIPELINES
        pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.name, self.group = name, pipelines[self.number]
        self.count = count_of(name, PIPELINES)
        numbers = own_numbers(name, self.place, PIPELINES)
        self.modules: dict[int, nn.Module] = {number: Block(number) for number in numbers}
        parameters = [
            parameter for module in self.modules.values() for parameter in module.parameters()
        ]
        if wrap is None:
            self.optimizer = trireme.ZeroRedundancyOptimizer(
                parameters, SGD, process_group=copies[self.place], stage=2, lr=0.5
            )
        else:
            for number, module in self.modules.items():
                self.modules[number] = wrap(module, copies[self.place])
        self.whole = nn.Sequential(*map(Block, range(self.count)))
        self.plain = SGD(self.whole.parameters(), lr=0.5)

    def schedule(self, names: Any, stage_class: Any, **options: Any) -> Any:
        stages = [
            stage_class(module, number, self.count, CPU, group=self.group)
            for number, module in self.modules.items()
        ]
        found = names.get_schedule_class(self.name)
        given = stages[0] if self.name in SINGLE else stages
        return found(given, MICRO_BATCHES, mse_loss, **options)

    def batch(self, step: int, copy: int) -> tuple[Tensor, Tensor]:
        return rows(10 * step + 2 * copy, 8), rows(10 * step + 2 * copy + 1, 8)

    def run(self, schedule: Any, step: int) -> None:
        x, y = self.batch(step, self.number)
        target = {"target": y} if self.count - 1 in self.modules else {}
        schedule(*((x,) if 0 in self.modules else ()), **target)

    def train_alone(self, step: int, *, divisor: int = COPIES * MICRO_BATCHES) -> None:
        """One process steps with what all copies compute."""
        self.plain.zero_grad()
        for copy in range(COPIES):
            batch = (tensor.chunk(MICRO_BATCHES) for tensor in self.batch(step, copy))
            for x, y in zip(*batch, strict=True):
                mse_loss(self.whole(x), y).backward()
        for parameter in self.whole.parameters():
            assert parameter.grad is not None
            parameter.grad /= divisor
        self.plain.step()

    def parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, module in self.modules.items():
            yield from zip(module.parameters(), self.whole[number].parameters(), strict=True)


@pytest.mark.parametrize("name", NAMES)
@on_shm_ranks(4, timeout=60)
def test_our_stages_refuse_torchs_schedules_and_train_by_ours(rank: int, name: str) -> None:
    """All ranks refuse before a message is sent."""
    copy = Copy(name, rank)
    foreign = copy.schedule(TORCHS, OURS.PipelineStage)
    theirs = TORCHS.get_schedule_class(name).__name__
    text = (
        f"got torch's {theirs} over stage {copy.place}, with a ZeroRedundancyOptimizer of stage 2"
    )
    with raises(NotImplementedError, text):
        copy.run(foreign.step, 0)
    if name not in V_SHAPED:  # their eval() fails in torch
        copy.run(foreign.eval, 0)
    schedule = copy.schedule(OURS, OURS.PipelineStage)
    for step in range(2):
        copy.optimizer.zero_grad()
        copy.run(schedule.step, step)
        assert copy.optimizer.last_step()["step"] == (step + 1) * len(copy.modules)
        copy.optimizer.step()
        copy.train_alone(step)
        for got, expected in copy.parameters():
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", NAMES)
@on_shm_ranks(4, timeout=60)
def test_torchs_stages_and_schedules(rank: int, name: str) -> None:
    """Nobody steps with what torch has divided, or brought past autograd's accumulation."""
    copy = Copy(name, rank)
    copy.run(copy.schedule(TORCHS, TORCHS.PipelineStage).step, 0)
    with raises(RuntimeError, "is not the average over the ranks"):
        copy.optimizer.step()
    for got, expected in copy.parameters():
        assert torch.equal(got, expected)

    copy.optimizer.zero_grad()
    copy.run(copy.schedule(TORCHS, TORCHS.PipelineStage, scale_grads=False).step, 0)
    if "ZeroBubble" in name:
        with raises(RuntimeError, "run a pipeline by a schedule of trireme.pipelining"):
            copy.optimizer.step()
        return
    copy.optimizer.step()
    copy.train_alone(0, divisor=COPIES)
    for got, expected in copy.parameters():
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("wrap", [in_ddp, sharded])
@on_shm_ranks(4, timeout=60)
def test_backwards_in_halves_over_our_stages(rank: int, wrap: Any, name: str) -> None:
    """They go past what averages; schedules of torch whose backwards are whole go well."""
    copy = Copy(name, rank, wrap)
    theirs = TORCHS.get_schedule_class(name).__name__
    what = "DistributedDataParallel" if wrap is in_ddp else "trireme.fully_shard"
    text = f"got torch's {theirs} over stage {copy.place}, with {what}, by backwards in two halves"
    with raises(NotImplementedError, text):
        copy.run(copy.schedule(TORCHS, OURS.PipelineStage).step, 0)
    if name in V_SHAPED:
        return
    copy.name = "Interleaved1F1B"
    copy.run(copy.schedule(TORCHS, OURS.PipelineStage).step, 0)
    copy.train_alone(0)
    for got, expected in copy.parameters():
        assert got.grad is not None and expected.grad is not None
        full = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
        torch.testing.assert_close(full, expected.grad)


@pytest.mark.parametrize("wrap", [in_ddp, sharded])
@on_shm_ranks(4, timeout=60)
def test_backwards_in_halves_over_torchs_stages(rank: int, wrap: Any) -> None:
    """What has missed its averages says so, at the end of the step or in the next forward."""
    copy = Copy("InterleavedZeroBubble", rank, wrap)
    step = copy.schedule(TORCHS, TORCHS.PipelineStage).step
    if wrap is in_ddp:
        copy.run(step, 0)
    with pytest.raises(Exception) as caught:
        copy.run(step, 1)
    if copy.place == 1:  # others may hear first that this one is gone
        cause = caught.value.__cause__ or caught.value
        assert isinstance(cause, RuntimeError)
        assert HOUSE_FORM.match(str(cause)), cause
        assert "run pipelines whose backwards come in two halves" in str(cause)
