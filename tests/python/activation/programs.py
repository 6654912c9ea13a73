"""Small programs in which something is checkpointed, run plain, by torch's function and by ours.

    @bits
    def a_program(again: Again) -> Values:
        x = torch.randn(3, requires_grad=True)
        again(torch.exp, x).sum().backward()
        return [x.grad]

All three begin with one seed. What they return, and the random numbers that come next, are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import trireme
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

Again = Callable[..., Any]
Values = Sequence[Any]
Program = Callable[[Again], Values]

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
OPTIONS = (
    *("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"),
    "respect_saved_tensors_hooks",
)


def plain(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Calls it, whatever the options of a checkpoint are."""
    return function(*inputs, **{name: it for name, it in named.items() if name not in OPTIONS})


def torchs(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False, **named)


def ours(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return trireme.checkpoint(function, *inputs, **named)


def run(program: Program, again: Again) -> list[Any]:
    torch.manual_seed(7)
    return [*program(again), torch.rand(2)]


def assert_same_bits(found: Any, expected: Any, where: str = "") -> None:
    """Compares nested values; tensors by shape, dtype and bits."""
    (mine, shape), (theirs, other) = tree_flatten(found), tree_flatten(expected)
    assert shape == other, where
    for number, (one, another) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(one, torch.Tensor):
            assert one.dtype == another.dtype and torch.equal(one, another), (where, number)
        else:
            assert one == another, (where, number)


def leaves(count: int, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape or (4, 6), requires_grad=True) for _ in range(count)]


def gradients(*holders: Any) -> list[torch.Tensor | None]:
    """Those of tensors, and of the parameters of modules."""
    found = []
    for holder in holders:
        tensors = holder.parameters() if isinstance(holder, nn.Module) else [holder]
        found += [None if it.grad is None else it.grad.clone() for it in tensors]
    return found


def net() -> nn.Module:
    layers = [nn.Linear(6, 13), nn.Tanh(), nn.Dropout(0.4), nn.Linear(13, 6), nn.LayerNorm(6)]
    return nn.Sequential(*layers)


def waves(x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
    """Saves four tensors or more."""
    return ((x.sin().exp() * (x if w is None else w)).cos() + 1).log()
