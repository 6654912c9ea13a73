"""Ranks of fully_shard measure what one process measures, and choose alike."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from harness.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.drop(self.down(torch.tanh(self.up(x))))
        return x + inner


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(5)))
        self.budget: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.budget is None:
            return self.blocks(x)
        found: Tensor = trireme.checkpoint_sequential(
            self.blocks, "auto", x, budget_bytes=self.budget
        )
        return found


def sharded(fully_shard: Any, **options: Any) -> Chain:
    model = Chain()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def losses(model: nn.Module, rank: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def measure(rank: int, backend: str, of_torch: bool) -> list[float]:
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    fully_shard = torchs_fully_shard if of_torch else trireme.fully_shard
    x = torch.randn(4, 6)
    plain = Chain()
    expected = trireme.measure_activations(plain, x, layers=list(plain.blocks))
    times: list[float] = []
    for keep in (False, True):
        model = sharded(fully_shard, reshard_after_forward=not keep)
        found = trireme.measure_activations(model, x, layers=list(model.blocks))
        for one, other in zip(found, expected, strict=True):
            sizes = (one.name, one.bytes, one.kept, one.output_bytes)
            assert sizes == (other.name, other.bytes, other.kept, other.output_bytes)
        times += [cost.time for cost in found[:-1]]
    budget = sum(cost.bytes for cost in expected) * 2 // 3
    unhindered = losses(sharded(fully_shard), rank)
    model = sharded(fully_shard)
    model.budget = budget
    for one, other in zip(losses(model, rank), unhindered, strict=True):
        assert torch.equal(one, other)
    dist.destroy_process_group()
    return times


@pytest.mark.parametrize(
    ("backend", "of_torch"), [("trireme", False), ("gloo", False), ("gloo", True)]
)
def test_sharded_layers_cost_what_whole_ones_cost(backend: str, of_torch: bool) -> None:
    first, second = run_ranks(measure, 2, backend, of_torch)
    assert first == second
