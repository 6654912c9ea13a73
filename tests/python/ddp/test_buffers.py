"""Buffers: rank 0's before every forward, wherever the module keeps them by then."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ddp.ranks import assert_equals_torch, backward, record_wire
from harness.models import batch
from harness.on_ranks import WORLD, on_ranks
from harness.recording import needs_recording
from harness.training import assert_same_on_all_ranks


def normed() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    "options",
    [{}, {"broadcast_buffers": False}, {"forward_sync_buffers": False}, {"init_sync": False}],
    ids=str,
)
@on_ranks()
def test_batch_norm_equals_torch(rank: int, options: dict[str, bool]) -> None:
    assert_equals_torch(normed, backward, rank, **options)


@on_ranks()
def test_batch_norm_equals_torch_under_no_sync(rank: int) -> None:
    """A forward after an unsynchronized one broadcasts nothing; the parameters did not move."""

    def accumulate(model: Any, step: int, rank: int) -> None:
        with model.no_sync():
            backward(model, 3 * step, rank)
            backward(model, 3 * step + 1, rank)
        backward(model, 3 * step + 2, rank)

    assert_equals_torch(normed, accumulate, rank)


class Counter(nn.Module):
    """Changes its buffers in every way there is."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([True, False, rank == 1]))
        self.register_buffer("steps", torch.tensor(100 * rank))
        self.register_buffer("moved", torch.full((2, 3), float(rank)).t())
        self.register_buffer("private", torch.full((2,), float(rank)), persistent=False)
        self.register_buffer("absent", None)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffers = (self.mask, self.steps, self.moved, self.private)
        self.seen = [buffer.clone() for buffer in buffers]
        if self.absent is not None:
            self.seen.append(self.absent.clone())
        return x * self.weight


@on_ranks()
def test_buffers_of_every_kind(rank: int) -> None:
    """Booleans, integers, transposed, not persistent, reassigned and late ones."""
    ddp = trireme.DistributedDataParallel(Counter(rank))
    for step in range(4):
        if step == 1:
            ddp.module.steps = torch.tensor(7 + rank)  # another tensor in its place
            ddp.module.mask.logical_not_()
        if step == 2:
            ddp.module.absent = torch.full((5,), 1.0 + rank)
        if step == 3:
            ddp.module.absent = None
        ddp(torch.ones(3)).sum().backward()
        assert_same_on_all_ranks(ddp.module.seen)
        if step == 1:
            assert ddp.module.seen[1].item() == 7
        if step == 2:
            assert torch.equal(ddp.module.seen[-1], torch.ones(5))


@on_ranks()
def test_ignored_buffers_and_parameters(rank: int) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model[0].bias.data.fill_(rank)
    model[1].running_mean.fill_(rank)
    names = ["0.bias", "1.running_mean"]
    trireme.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = trireme.DistributedDataParallel(model)
    assert model[0].bias[0] == rank
    ddp(batch(0)[rank::WORLD]).sum().backward()
    bias = [torch.empty(4) for _ in range(WORLD)]
    means = [torch.empty(4) for _ in range(WORLD)]
    dist.all_gather(bias, model[0].bias.detach())
    dist.all_gather(means, model[1].running_mean)
    assert not torch.equal(bias[0], bias[1])
    assert not torch.equal(means[0], means[1])
    assert "0.bias" not in {name for bucket in ddp._core.plan() for name in bucket}


@on_ranks()
def test_two_forwards_of_a_batch_norm_before_one_backward(rank: int) -> None:
    """The broadcast of the second changes buffers that the first one's graph has saved."""

    def twice(model: nn.Module, step: int, rank: int) -> None:
        first = model(batch(2 * step)[rank::WORLD])
        second = model(batch(2 * step + 1)[rank::WORLD])
        (first.square().mean() + second.square().mean()).backward()

    assert_equals_torch(normed, twice, rank)


@on_ranks()
def test_eval_mode_uses_buffers_saved_for_backward(rank: int) -> None:
    """Frozen statistics in a graph, then another forward, then backward."""
    ddp = trireme.DistributedDataParallel(normed()).eval()
    first = ddp(batch(0)[rank::WORLD]).sum()
    second = ddp(batch(1)[rank::WORLD]).sum()
    (first + second).backward()


@on_ranks()
def test_no_grad_forwards_follow_torch(rank: int) -> None:
    """Evaluation right after a training step broadcasts once, as torch does."""
    counts = {}
    for kind in (TorchDDP, trireme.DistributedDataParallel):
        ddp = kind(normed())
        backward(ddp, 0, rank)
        ddp.eval()
        ddp.module[1].running_mean.fill_(rank)
        with torch.no_grad():
            ddp(batch(1)[rank::WORLD])
            after_first = ddp.module[1].running_mean[0].item()
            ddp.module[1].running_mean.fill_(rank)
            ddp(batch(1)[rank::WORLD])
        counts[kind] = (after_first, ddp.module[1].running_mean[0].item())
    assert counts[TorchDDP] == counts[trireme.DistributedDataParallel] == (0.0, float(rank))


@needs_recording
@on_ranks()
def test_all_buffers_travel_in_one_broadcast(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(normed())
    wire = record_wire(ddp)
    ddp(batch(0)[rank::WORLD])
    assert [record.verb for record in wire.records] == ["broadcast"]
    assert wire.records[0].label == "module buffers"
    assert wire.records[0].bytes == 2 * (4 + 2) * 4 + 2 * 8


@pytest.mark.parametrize("location", list(_BufferCommHookLocation))
@on_ranks()
def test_a_buffer_comm_hook(rank: int, location: _BufferCommHookLocation) -> None:
    """Averages running means instead of taking rank 0's."""
    calls: list[str] = []

    def hook(state: object, named_buffers: dict[str, torch.Tensor]) -> list[Any]:
        assert state == "state"
        futures = []
        for name, buffer in named_buffers.items():
            if name.endswith("running_mean"):
                calls.append(name)
                buffer.div_(WORLD)
                futures.append(dist.all_reduce(buffer, async_op=True).get_future())
        return futures

    ddp = trireme.DistributedDataParallel(normed())
    ddp._register_buffer_comm_hook("state", hook, location)
    ddp.module[1].momentum = None  # running_mean is the mean of all batches so far
    ddp(batch(0)[rank::WORLD]).sum().backward()
    assert calls == ["1.running_mean", "3.running_mean"]
    if location is _BufferCommHookLocation.POST_FORWARD:
        with torch.no_grad():
            expected = ddp.module[0](batch(0)).mean(0)
        torch.testing.assert_close(ddp.module[1].running_mean, expected)
    calls.clear()
    with torch.no_grad():
        ddp(batch(0)[rank::WORLD])
    assert calls == ["1.running_mean", "3.running_mean"]
