"""Gradients in fp32 of parameters in bf16 (``Tensor.grad_dtype``): as one process has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trireme
from torch import nn

from contract.strategies import Strategy, on_every_strategy
from harness.training import Training, accumulate_both


class _WideLinear(torch.autograd.Function):
    """Weights in any dtype; it computes in fp32, and brings gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.float(), grad.t() @ x


class WideLinear(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, rows).bfloat16() / 4)
        self.weight.grad_dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WideLinear.apply(x, self.weight)


def wide() -> nn.Module:
    """Also with a layer of fp32 beside, and one whose rows are fewer than ranks."""
    torch.manual_seed(4)
    return nn.Sequential(
        WideLinear(6, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), WideLinear(5, 2)
    )


def step_both(strategy: Strategy, ours: Training, one: Training) -> None:
    """Gradients as in one process, dtype included; then both have one process's parameters.

    A last bit of bf16 that a sum's order has turned would else grow from step to step.
    """
    for parameter in ours.model.parameters():
        assert parameter.grad_dtype == torch.float32
        assert parameter.grad.dtype == torch.float32
    strategy.step_both(ours, one)


@on_every_strategy(3)
def test_steps_and_accumulation(rank: int, strategy: Strategy) -> None:
    for optimizer_class in (torch.optim.SGD, trireme.optim.AdamW):
        ours, one = strategy.pair(wide, optimizer_class, lr=0.01)
        for step in range(3):
            for training in (ours, one):
                training.optimizer.zero_grad()
                training.backward(step)
            step_both(strategy, ours, one)
        accumulate_both(ours, one, lambda a, b: step_both(strategy, a, b))


@on_every_strategy()
def test_clipping(rank: int, strategy: Strategy) -> None:
    ours, one = strategy.pair(wide)
    for step in range(3):
        norms = []
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
            norms.append(trireme.clip_grad_norm_(list(training.model.parameters()), 0.05))
        assert norms[1] > 0.05
        torch.testing.assert_close(norms[0], norms[1])
        step_both(strategy, ours, one)


@on_every_strategy()
def test_saved_in_the_middle(rank: int, strategy: Strategy, tmp_path: Path) -> None:
    """Parameters are saved in their dtype, the optimizer's state in its own."""
    ours, one = strategy.pair(wide, trireme.optim.AdamW, lr=0.01)
    for step in range(2):
        strategy.train_both(ours, one, step)
    trireme.save_checkpoint(tmp_path / "saved", ours.model, ours.optimizer)
    again, _ = strategy.pair(wide, trireme.optim.AdamW, lr=0.01)
    trireme.load_checkpoint(tmp_path / "saved", again.model, again.optimizer)
    strategy.train_both(again, one, 2)
    assert {parameter.grad.dtype for parameter in again.model.parameters()} == {torch.float32}
