"""Layers that bring what another part may not expect: rows, a state of their own, lazy tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6
IDS = 5


def square_mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Lookup(nn.Module):
    """Adds rows to its input, by ids that are computed from that."""

    def __init__(self, table: nn.Module, bags: bool, reads: bool) -> None:
        super().__init__()
        self.table, self.bags, self.reads = table, bags, reads

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach().abs() * 3).long().clamp(max=IDS - 1)
        rows = self.table(ids[:, :3] if self.bags else ids[:, 0])
        # Where others step rows at any time, gradients must not depend on them.
        return x + (rows if self.reads else rows - rows.detach())


class Tempered(nn.Module):
    """A loss that is trained, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return square_mean(output * self.scale, target)


class Again(nn.Module):
    """Two layers in a checkpoint of some kind."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.run = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner, x)


class Scaled(nn.Linear):
    """One of several layers in a row, whose gradients differ in size."""

    def __init__(self, scale: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) * self.scale)


class Counted(nn.Linear):
    """Has a count that state_dict() shows in torch's own way for what is no tensor."""

    count = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Packed(nn.Linear):
    """Saves its weight turned."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}turned"] = self.weight.detach().t()
        destination[f"{prefix}bias"] = self.bias.detach()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}turned"].t())
            self.bias.copy_(state[f"{prefix}bias"])


class Phases(nn.Module):
    """A complex parameter between real inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.reshape(len(x), -1, 2).contiguous())
        return torch.view_as_real(numbers * self.phase).flatten(1)


class LazyGradient(torch.autograd.Function):
    """The identity, whose gradient has torch's lazy minus."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch._neg_view(-gradient)


class LazyMinus(nn.Linear):
    """Its output and its gradients are negated lazily."""

    def forward(self, x: Tensor) -> Tensor:
        weight = LazyGradient.apply(self.weight)
        bias = LazyGradient.apply(self.bias)
        return torch._neg_view(-functional.linear(LazyGradient.apply(x), weight, bias))


class Conjugated(nn.Module):
    """Hands on complex numbers that are conjugated lazily."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x.reshape(len(x), -1, 2).contiguous()).conj()


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.resolve_conj()).flatten(1)
