"""What backward(create_graph=True) leaves: gradients, whose derivatives are tested in fp64."""

from __future__ import annotations

import torch
from torch import nn

from harness.models import batch, mlp
from harness.on_ranks import WORLD
from harness.training import gradients

Derived = list[torch.Tensor | None]


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(batch(number, dtype=torch.float64)[rank::WORLD]).square().mean()


def derived(model: nn.Module) -> Derived:
    """The derivative of all gradients, in a direction that is equal on all ranks."""
    parameters = list(model.parameters())
    of = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and parameter.grad.requires_grad
    ]
    if not of:
        return []
    directions = [torch.sin(torch.arange(1.0, tensor.numel() + 1).view_as(tensor)) for tensor in of]
    directions = [direction.double() for direction in directions]
    return list(torch.autograd.grad(of, parameters, directions, True, allow_unused=True))


def local(number: int, rank: int) -> tuple[dict[str, torch.Tensor | None], Derived]:
    """What one rank has, alone in its process."""
    model = mlp(torch.float64)
    loss_of(model, number, rank).backward(create_graph=True)
    return gradients(model), derived(model)
