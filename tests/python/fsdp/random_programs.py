"""Random training programs: what ranks do together and alone, and what one process comes to."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp.ranks import assert_parts, evaluate
from harness.models import batch
from harness.training import ROWS, Training, scale

CLOSE = {"rtol": 1e-6, "atol": 1e-7}  # in fp64


class Net(nn.Module):
    """Residual layers, some of them computed again in backward; a call may name its path."""

    def __init__(self, checkpointed: list[bool]) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in checkpointed)
        self.last = nn.Parameter(torch.randn(3, 6) / 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def forward(self, x: torch.Tensor, path: list[int] | None = None) -> torch.Tensor:
        x = x.double()
        for index in range(len(self.layers)) if path is None else path:
            layer = self.layers[index]
            again = self.checkpointed[index] and torch.is_grad_enabled()
            run = trireme.checkpoint if index % 2 else checkpoint
            x = x + (run(layer, x, use_reentrant=False) if again else layer(x)).tanh()
        return x @ self.last.t() * self.scale


@dataclass
class Program:
    """What happens, the same on all ranks, and which of them does what it does alone."""

    random: random.Random
    ours: Training
    one: Training

    def paths(self) -> list[list[int] | None]:
        """One per rank."""
        layers = range(len(self.ours.model.layers))
        return [
            None
            if self.random.random() < 0.6
            else self.random.sample(layers, self.random.randint(0, len(layers)))
            for _ in range(self.ours.world)
        ]

    def losses(self, number: int, paths: list[list[int] | None]) -> list[torch.Tensor]:
        """Computes those of this rank, and of all of them in one process."""
        rank, world = self.ours.rank, self.ours.world
        rows = batch(number, rows=ROWS)
        mine = self.ours.model(rows[rank::world], paths[rank]).square().mean()
        theirs = [
            self.one.model(rows[other::world], paths[other]).square().mean() / world
            for other in range(world)
        ]
        return [mine, sum(theirs)]

    def backward(self) -> None:
        for loss in self.losses(self.random.randint(0, 99), self.paths()):
            loss.backward()

    def backward_of_two(self) -> None:
        first = self.losses(self.random.randint(0, 99), self.paths())
        second = self.losses(self.random.randint(0, 99), self.paths())
        for one, other in zip(first, second, strict=True):
            (one + other).backward()

    def accumulate(self) -> None:
        self.ours.model.set_requires_gradient_sync(False)
        self.backward()
        self.ours.model.set_requires_gradient_sync(True)

    def evaluate(self) -> None:
        if self.random.randrange(self.ours.world) == self.ours.rank:
            outputs = [evaluate(training, 50) for training in (self.ours, self.one)]
            torch.testing.assert_close(*outputs, **CLOSE)

    def freeze_or_unfreeze(self) -> None:
        layer = self.random.randrange(len(self.ours.model.layers))
        for training in (self.ours, self.one):
            bias = training.model.layers[layer].bias
            bias.requires_grad_(not bias.requires_grad)

    def fail(self) -> None:
        layer = self.random.choice(list(self.ours.model.layers))
        handle = layer.register_forward_hook(_fail)
        with pytest.raises(ArithmeticError):
            self.ours.model(batch(0))
        handle.remove()

    def flag(self) -> None:
        self.ours.model.set_reshard_after_forward(self.random.random() < 0.5)
        self.ours.model.set_reshard_after_backward(self.random.random() < 0.5)

    def write(self) -> None:
        with trireme.writing(self.ours.model):
            scale(self.ours.model, 0.95)
        scale(self.one.model, 0.95)

    def step(self) -> None:
        set_to_none = self.random.random() < 0.6
        for training in (self.ours, self.one):
            training.optimizer.zero_grad(set_to_none=set_to_none)
        before = [self.accumulate, self.evaluate, self.freeze_or_unfreeze, self.fail, self.flag]
        middle = [self.backward, self.backward, self.backward_of_two]
        for act in self.random.choices([*before, *middle], k=self.random.randint(0, 4)):
            act()
        self.backward()
        _reshard(self.ours.model)
        assert_parts(self.ours, self.one, grads=True, **CLOSE)
        for training in (self.ours, self.one):
            training.optimizer.step()
        for act in self.random.choices([self.evaluate, self.write], k=self.random.randint(0, 2)):
            act()
        _reshard(self.ours.model)
        assert_parts(self.ours, self.one, **CLOSE)


def _fail(*_: Any) -> None:
    raise ArithmeticError


def _reshard(model: Any) -> None:
    for unit in model.modules():
        if isinstance(unit, trireme.FSDPModule):
            unit.reshard()
