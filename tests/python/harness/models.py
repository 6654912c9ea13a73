"""Models and batches that many tests train on; the same on every rank."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ModelMaker = Callable[[], nn.Module]


class Tied(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        layers = {"embed": nn.Linear(6, 6, bias=False), "mid": nn.Linear(6, 6), "tanh": nn.Tanh()}
        super().__init__(OrderedDict(layers, head=nn.Linear(6, 6)))
        self.head.weight = self.embed.weight


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three layers of uneven shapes; the same on every rank."""
    torch.manual_seed(7)
    layers = [nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, rows: int = 8, width: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    """The whole batch of a step; rank r of w takes ``batch[r::w]``."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, width, generator=generator).to(dtype)


class Shapes(nn.Module):
    """Fewer rows than ranks, a scalar, one without elements, turned memory, four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 13)
        self.turned = nn.Parameter(torch.randn(13, 5).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.wide = nn.Linear(5, 3).double()
        self.narrow = nn.Linear(5, 1).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(self.first(x).tanh(), self.turned).tanh() * self.scale
        wide = self.wide(hidden.double()).float()
        wide = wide + torch.view_as_real(wide * self.phase).mean(-1)
        # Detached: what is rounded to 8 bits has no say in the other gradients.
        narrow = self.narrow(hidden.detach().bfloat16()).float()
        return torch.cat([wide, narrow], dim=1) + self.empty.sum()
