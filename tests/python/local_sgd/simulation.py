"""Workers in one process, which do what LocalSGD and DiLoCo say, one line after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import SGD, AdamW

from harness.models import batch, mlp

Models = Sequence[nn.Module]


@dataclass
class Simulation:
    """DiLoCo of ``workers`` with cuts at parameters: fragment f has those from cuts[f] on."""

    workers: int
    sync_every: int
    cuts: Sequence[int] = (0,)
    delay: int = 0
    alpha: float = 0.0
    outer: Callable[..., torch.optim.Optimizer] = field(
        default=lambda params: SGD(params, lr=0.7, momentum=0.9, nesterov=True)
    )
    weights: Callable[[int, int], float] = field(default=lambda round, worker: 1.0)

    def __post_init__(self) -> None:
        self.models = [mlp() for _ in range(self.workers)]
        self.inner = [inner_optimizer(model) for model in self.models]
        self.anchors = [param.detach().clone() for param in self.models[0].parameters()]
        self.steps = self.outer(self.anchors)
        self.round, self.step_of_round = 0, 0

    def fragment(self) -> range:
        number = self.round % len(self.cuts)
        ends = [*self.cuts[1:], len(self.anchors)]
        return range(self.cuts[number], ends[number])

    def train(self, step: int) -> None:
        for worker, (model, optimizer) in enumerate(zip(self.models, self.inner, strict=True)):
            train(model, optimizer, step, worker, self.workers)
        self.step_of_round += 1
        period = self.sync_every // len(self.cuts)
        if self.step_of_round == period - self.delay:
            self.leaves()
        if self.step_of_round == period:
            self.is_applied()
            self.step_of_round, self.round = 0, self.round + 1

    def leaves(self) -> None:
        """With no weight at all nothing does."""
        weights = [self.weights(self.round, worker) for worker in range(self.workers)]
        self.means = None
        if sum(weights) == 0:
            return
        params = [list(model.parameters()) for model in self.models]
        self.means = [
            sum(
                weight * (self.anchors[index] - own[index].detach())
                for weight, own in zip(weights, params, strict=True)
            )
            / sum(weights)
            for index in self.fragment()
        ]

    @torch.no_grad()
    def is_applied(self) -> None:
        if self.means is None:
            return
        for index, mean in zip(self.fragment(), self.means, strict=True):
            self.anchors[index].grad = mean
        self.steps.step()
        for index in self.fragment():
            self.anchors[index].grad = None
            for model in self.models:
                param = list(model.parameters())[index]
                param.copy_(torch.lerp(self.anchors[index], param, self.alpha))


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=0.02)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, worker: int, workers: int
) -> None:
    optimizer.zero_grad()
    backward(model, step, worker, workers)
    optimizer.step()


def backward(model: nn.Module, step: int, worker: int, workers: int) -> None:
    model(batch(step, rows=12)[worker::workers]).square().mean().backward()


def assert_close(ours: nn.Module | Sequence[torch.Tensor], theirs: nn.Module) -> None:
    own = ours.parameters() if isinstance(ours, nn.Module) else ours
    for mine, other in zip(own, theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
