"""300 random nets, checkpointed in random places, have the bits of plain ones."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from activation.programs import Again, assert_same_bits, gradients, ours, plain, torchs

NETS, PER_TEST = 300, 50


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, again: Again, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.again, self.options = inner, again, options

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.inner, x, **self.options)


class Skipping(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Either(nn.Module):
    """Draws which one runs."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[int(torch.randint(len(self.inner), ()))](x)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = (x * 0.5).add_(1)
        hidden[:, ::2].mul_(2)
        return hidden.relu_().sin()


class Cut(nn.Module):
    """Nothing flows back through one half."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return torch.cat([left.detach().exp().clamp(max=3), right * left.sigmoid()], dim=1)


def frozen(layer: nn.Linear, names: list[str]) -> nn.Linear:
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


def part_of_net(chance: random.Random, depth: int, again: Again) -> nn.Module:
    def inner() -> nn.Module:
        return part_of_net(chance, depth - 1, again)

    kinds = ["linear", "frozen", "tanh", "dropout", "norm", "in place", "cut"]
    if depth > 0:
        kinds = [*kinds[:3], *2 * ["skipping", "either", "list"], *6 * ["checkpointed"]]
    kind = chance.choice(kinds)
    if kind == "linear":
        return nn.Linear(6, 6)
    if kind == "frozen":
        names = ["weight", "bias"]
        return frozen(nn.Linear(6, 6), chance.sample(names, chance.randint(1, 2)))
    if kind == "skipping":
        return Skipping(inner())
    if kind == "either":
        return Either(inner(), inner())
    if kind == "list":
        return nn.Sequential(*(inner() for _ in range(chance.randint(1, 4))))
    if kind == "checkpointed":
        return Checkpointed(inner(), again, {"early_stop": chance.random() < 0.7})
    return {
        "tanh": nn.Tanh,
        "dropout": lambda: nn.Dropout(0.3),
        "norm": lambda: nn.LayerNorm(6),
        "in place": InPlace,
        "cut": Cut,
    }[kind]()


def trained(seed: int, again: Again) -> list[Any]:
    """Losses, gradients and the random number that comes next."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    parts = [part_of_net(chance, 4, again) for _ in range(chance.randint(1, 4))]
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), *parts)
    x = torch.randn(4, 6).requires_grad_(chance.random() < 0.5)
    mixed = chance.random() < 0.2
    with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
        losses = [model(x).float().square().mean() for _ in range(chance.randint(1, 3))]
    chance.shuffle(losses)
    for loss in losses:
        for retain in [True] * chance.randint(0, 1) + [False]:
            loss.backward(retain_graph=retain)
    return [losses, gradients(x, model), torch.rand(1)]


@pytest.mark.parametrize("first", range(0, NETS, PER_TEST))
def test_random_nets(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        expected = trained(seed, plain)
        for again in (ours, torchs) if seed % 10 == 0 else (ours,):
            assert_same_bits(trained(seed, again), expected, f"{again.__name__}, net {seed}")
