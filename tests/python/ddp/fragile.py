"""A model whose backward raises when it is told to."""

import torch
from torch import nn

from harness.faults import Breaks


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, breaks: bool = False) -> torch.Tensor:
        return self.last(Breaks.apply(self.first(x), breaks))
