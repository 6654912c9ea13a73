"""DDP trains as torch's DDP does, and as one process on the whole batch."""

import pytest
import torch
import trireme
from torch import nn

from ddp.ranks import assert_equals_torch
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks


def mean_square(model: nn.Module, step: int, rank: int, world: int = WORLD) -> None:
    parameter = next(model.parameters())
    model(batch(step, dtype=parameter.dtype)[rank::world]).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@on_ranks()
def test_dtypes(rank: int, dtype: torch.dtype) -> None:
    assert_equals_torch(lambda: mlp(dtype), mean_square, rank)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Conv2d(3, 8, 3)
        self.mix = nn.Conv2d(8, 4, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.stem(x.contiguous(memory_format=torch.channels_last)).relu())


def convolve(model: nn.Module, step: int, rank: int) -> None:
    torch.manual_seed(10 * step + rank)
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()


@on_ranks()
def test_channels_last(rank: int) -> None:
    assert_equals_torch(Convolutions, convolve, rank)
    model = trireme.DistributedDataParallel(Convolutions())
    convolve(model, 0, rank)
    weight = model.module.stem.weight
    assert weight.grad.stride() == weight.stride()  # an optimizer walks both side by side


@on_ranks(1)
def test_one_rank(rank: int) -> None:
    assert_equals_torch(mlp, lambda m, step, r: m(batch(step)).sum().backward(), rank)


@on_ranks()
def test_ranks_start_from_rank_0(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(rank + 1)
    kept = trireme.DistributedDataParallel(nn.Linear(3, 2), init_sync=False)
    weights = [torch.empty(2, 3) for _ in range(WORLD)]
    torch.distributed.all_gather(weights, kept.module.weight.detach())
    assert not torch.equal(weights[0], weights[1])
    trireme.DistributedDataParallel(model)
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    assert torch.equal(model[0].weight, expected.weight)
    assert torch.equal(model[1].running_mean, torch.ones(2))
