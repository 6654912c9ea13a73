"""Ranks of which some have fewer inputs, and what torch's DDP trains on them under join()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD

from harness.models import mlp
from harness.training import values

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


def inputs(rank: int, count: int) -> list[torch.Tensor]:
    """The first ones of that rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def loop(net: nn.Module, optimizer: Any, rows: list[torch.Tensor], zero_first: bool) -> None:
    """Trains on these rows; gradients become zero before each backward, or after each step."""
    for x in rows:
        if zero_first:
            optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()


def by_torchs_ddp(
    rank: int, counts: tuple[int, ...], make: Callable[..., Any] = SGD, **join: Any
) -> dict[str, torch.Tensor]:
    """What a plain optimizer trains there, with ``counts`` inputs by rank."""
    ddp = TorchDDP(mlp())
    optimizer = make(ddp.parameters(), **(OPTIONS if make is SGD else {}))
    with ddp.join(**join):
        loop(ddp, optimizer, inputs(rank, counts[rank]), zero_first=True)
    return values(ddp)
