"""Layers that count what they compute, and the samples that they are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import trireme
from torch import Tensor, nn

from harness.models import batch

SAMPLES = 24
DATA = batch(0, rows=SAMPLES)


class Counting(nn.Module):
    """A layer that tells how many rows it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.rows = torch.zeros((), dtype=torch.long)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        self.rows += x.size(0)
        return self.linear(x).tanh()

    def computed(self) -> int:
        """Since it was asked last."""
        rows, self.rows = int(self.rows), torch.zeros((), dtype=torch.long)
        return rows


def layers(count: int = 3) -> list[Counting]:
    torch.manual_seed(2)
    return [Counting() for _ in range(count)]


def frozen_layers(count: int = 3) -> list[Counting]:
    return [layer.requires_grad_(False) for layer in layers(count)]


def run(given: Sequence[nn.Module], x: Tensor) -> Tensor:
    with torch.no_grad():
        for layer in given:
            x = layer(x)
    return x


def counts(of: trireme.ActivationCache) -> tuple[int, int]:
    """Hits and misses."""
    stats = of.stats()
    return stats.hits, stats.misses
