"""Where units are gathered, a rank leaves out what backward comes to first, in a model whose
gradients take more buckets than may be on their way. The others would wait for it in one collective
and it for them in another.
"""

from __future__ import annotations

from typing import Any

import torch
import trireme
from torch import nn
from torch.optim import SGD

from fsdp.ranks import own
from harness.on_ranks import on_gloo_ranks


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor, way: str = "all") -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias if way == "all" else None)


class Broad(nn.Module):
    """Gradients in five buckets, of which two may be on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(1200, 1200) for _ in range(16))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        """``way``: what is used of the last layer, which backward comes to first."""
        *first, last = self.layers
        for layer in first:
            x = x + layer(x)
        return x if way == "none" else last(x, way)


@on_gloo_ranks(2)
def test_others_go_on_whose_first_gradients_are_left_out_here(rank: int) -> None:
    """They wait for them in vain, and this rank for what they gather."""
    model: Any = Broad()
    for layer in model.layers:
        trireme.fully_shard(layer)
    trireme.fully_shard(model)
    optimizer = SGD(model.parameters(), lr=0.01)
    last = model.layers[-1]
    for own_way in ("all", "weight", "none"):
        model(torch.ones(2, 1200), "all" if rank else own_way).sum().backward()
        expected = 2.0 if own_way == "all" else 1.0  # 2 rows, of ranks that use the bias
        torch.testing.assert_close(own(last.bias.grad), torch.full((600,), expected))
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 1200), "none").sum().backward()
    assert last.weight.grad is None
