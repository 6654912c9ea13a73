"""A module and rows that any number of workers trains alike, to be saved on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from trireme import ps

# Nobody can make a folder here.
NOWHERE = "/proc/nowhere/checkpoint"


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 200), nn.BatchNorm1d(200), nn.Linear(200, 200))


def tables(model: nn.Module, dense: Any, rows: Any) -> list[ps.Dense | ps.Sparse]:
    return [
        ps.Dense("net", model, optimizer=dense, reduction="sum"),
        ps.Sparse("items", 3, optimizer=rows, init=ps.Normal(1.0), reduction="sum"),
    ]


def train(server: ps.ParameterServer, model: nn.Module, clocks: range) -> None:
    """Worker 0 alone has gradients, so that it does not matter how many workers there are."""
    for clock in clocks:
        server["net"].pull()
        if server.worker == 0:
            if clock == 3:
                server["net"].set_lr(0.03)
                server["items"].set_lr(0.02)
            model(torch.full((4, 6), 1.0 + clock)).square().mean().backward()
            server["net"].push()
            ids = torch.tensor([clock, 5, -clock])
            server["items"].push(ids, torch.full((3, 3), 0.5 + clock))
        server.clock()
    server["net"].pull()


def seen_by(server: ps.ParameterServer, model: nn.Module) -> list[torch.Tensor]:
    values = [tensor.detach().clone() for tensor in model.state_dict().values()]
    return [*values, server["items"].ids(), server["items"].pull(torch.arange(-9, 9), create=False)]
