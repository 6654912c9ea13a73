"""Models of units that are skipped, computed again, or frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import trireme
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.models import mlp


class Skipping(nn.Module):
    """Three units, of which a call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.spare = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        for name in used:
            x = x * self.spare if name == "s" else self.get_submodule(name)(x).tanh()
        return x


class Checkpointed(nn.Module):
    """Layers alone, nested, twice, and between those that run as usual; None: by our function."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.reentrant = reentrant

    def again(self, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return trireme.checkpoint(run, x)
        return checkpoint(run, x, use_reentrant=self.reentrant)

    def nested(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[3](x).tanh()
        return self.again(self.layers[4], x).tanh() + self.layers[1](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x.clone().requires_grad_()).tanh()
        x = self.again(self.layers[1], x).tanh()
        x = self.layers[2](x).tanh()
        x = self.again(self.nested, x)
        x = self.again(self.layers[1], x).tanh()
        return self.again(self.layers[5], x)


def shard_list(model: Any, **options: Any) -> None:
    for layer in model.layers:
        trireme.fully_shard(layer, **options)
    trireme.fully_shard(model, **options)


def frozen_front() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model
