"""One process that trains on the batches of all workers, and what it comes to clock by clock."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from harness.models import mlp


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(10 * step + worker)
    return torch.randn(5, 6, generator=drawn), torch.randn(5, 3, generator=drawn)


def gradients(net: nn.Module, step: int, worker: int) -> list[Tensor]:
    x, y = batch(step, worker)
    return list(torch.autograd.grad((net(x) - y).square().mean(), list(net.parameters())))


def synchronous(workers: int, kind: Any, options: Any, reduction: str) -> Iterator[nn.Module]:
    """One process: gradients of all workers added in their order, and one step; the net before
    each step."""
    net = mlp()
    optimizer = kind(net.parameters(), **options)
    step = 0
    while True:
        yield net
        found = [gradients(net, step, worker) for worker in range(workers)]
        for parameter, *grads in zip(net.parameters(), *found, strict=True):
            parameter.grad = functools.reduce(operator.add, grads)
            if reduction == "mean":
                parameter.grad /= workers
        optimizer.step()
        step += 1


def assert_close(net: nn.Module, other: nn.Module) -> None:
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
