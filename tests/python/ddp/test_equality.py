"""DDP trains as torch's DDP does, and as one process on the whole batch."""

from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn

from ddp.ranks import WORLD, Tied, assert_equals_torch, batch, mlp, on_ranks, sgd


def mean_square(model: nn.Module, step: int, rank: int, world: int = WORLD) -> None:
    parameter = next(model.parameters())
    model(batch(step, dtype=parameter.dtype)[rank::world]).square().mean().backward()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@on_ranks()
def test_optimizers(rank: int, make_optimizer: Callable[[nn.Module], object]) -> None:
    assert_equals_torch(mlp, mean_square, rank, make_optimizer=make_optimizer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@on_ranks()
def test_dtypes(rank: int, dtype: torch.dtype) -> None:
    assert_equals_torch(lambda: mlp(dtype), mean_square, rank)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.view_as_real(x.to(torch.complex64) @ self.weight.mT).sum(-1)) * self.real


@on_ranks()
def test_complex_and_real_parameters(rank: int) -> None:
    def step(model: nn.Module, number: int, rank: int) -> None:
        model(batch(number)[rank::WORLD]).square().mean().backward()

    assert_equals_torch(Complex, step, rank)


class Mixed(nn.Module):
    """Parameters of four dtypes, a scalar, an empty one and an uneven one, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Parameter(torch.randn(6, 7, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.second = nn.Parameter(torch.randn(7, 3, 1))
        self.offset = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.last = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x.double() @ self.first).float() @ self.second.squeeze(-1) * self.scale
        return (hidden + self.offset + self.empty.sum()).double() * self.last


@on_ranks()
def test_mixed_dtypes_and_shapes(rank: int) -> None:
    assert_equals_torch(Mixed, lambda m, step, r: m(batch(step)[r::WORLD]).sum().backward(), rank)


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


@on_ranks()
def test_tied_parameters(rank: int) -> None:
    assert_equals_torch(Tied, mean_square, rank)


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


@on_ranks()
def test_frozen_parameters(rank: int) -> None:
    assert_equals_torch(partly_frozen, mean_square, rank)


@on_ranks()
def test_sums_of_integers_are_exact(rank: int) -> None:
    """Averages that fp32 can hold are bitwise those of one process."""
    model = nn.Linear(4, 3, bias=False)
    nn.init.ones_(model.weight)
    ddp = trireme.DistributedDataParallel(model)
    rows = torch.arange(16.0).reshape(4, 4)
    ddp(rows[rank::WORLD]).sum().backward()
    assert torch.equal(model.weight.grad, (rows.sum(0) / WORLD).expand(3, 4))


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
