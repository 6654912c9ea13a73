"""A few steps of training on a device, and one process on the CPU that takes whole batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn

from device.devices import moved
from harness.models import batch, mlp

STEPS = 4


def trained_alone(clips: bool = True) -> nn.Module:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    clip: Any = torch.nn.utils.clip_grad_norm_,
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        part = batch(step).chunk(world)[rank].to(device)
        model(part).float().square().mean().backward()
        if clip is not None:
            clip(model.parameters(), 0.1)
        optimizer.step()


def check(model: nn.Module, device: torch.device, expected: nn.Module, close: float) -> None:
    rows = batch(9)
    found = model(rows.to(device)).float().cpu()
    torch.testing.assert_close(found, expected(rows), rtol=close, atol=close)


def sharded(device: torch.device, **options: Any) -> nn.Module:
    model = moved(mlp(), device)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            trireme.fully_shard(layer, **options)
    trireme.fully_shard(model, **options)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
