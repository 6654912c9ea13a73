"""Outputs that are views, which whoever called the module changes in place.

Autograd then leaves the view's own function out of the backward: who watches that only is never
told. torch's DDP clones outputs against it; its fully_shard raises.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.optim import SGD

from ddp.ranks import assert_equals_torch
from fsdp.ranks import in_training, train_both
from harness.models import batch
from harness.on_ranks import on_ranks
from harness.ranks import run_ranks
from harness.training import alone


class Split(nn.Module):
    """Both halves of a layer's output; only one is changed in place, and perhaps used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.layer(x)
        return both.narrow(1, 0, 6), both.narrow(1, 6, 6)


class PassesOn(nn.Module):
    """Returns a view of what it was given beside its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x.view(-1, 6)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.heads = nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)))
        self.split = Split()
        self.passes_on = PassesOn()
        self.last = nn.Sequential(nn.Linear(6, 2), nn.Flatten(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.heads(x)
        h += 1
        left, right = self.split(h.flatten(1))
        left *= 2
        h, given = self.passes_on(left + 0 * right if self.training else left + 1)
        del given
        return self.last(h.tanh())


@on_ranks()
def test_ddp(rank: int) -> None:
    def step(model: nn.Module, number: int, rank: int) -> None:
        output = model(batch(number)[rank::2])
        output.mul_(2).add_(1)
        output.square().mean().backward()

    assert_equals_torch(Views, step, rank)


def changed_in_place(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output.mul_(0.5)


@pytest.mark.parametrize("backend", ["gloo", "trireme"])
def test_fully_shard(backend: str) -> None:
    run_ranks(train_in_units, 2, backend)


def train_in_units(rank: int, backend: str) -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    model = Views()
    for child in model.children():
        trireme.fully_shard(child)
    trireme.fully_shard(model)
    ours, one = in_training(model), alone(Views, SGD, lr=0.1, momentum=0.9)
    for training in (ours, one):
        training.model.register_forward_hook(changed_in_place)
    for step in range(4):
        for training in (ours, one):
            training.model.train(step != 2)
        train_both(ours, one, step)
    dist.destroy_process_group()
