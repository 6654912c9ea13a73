"""ZeroRedundancyOptimizer(stage=2, fused_step=True): the bits of the same without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
import trireme.optim
from torch import nn

from harness.faults import raises
from harness.on_ranks import on_ranks


class Mixed(nn.Module):
    """Parameters of several dtypes, uneven over the ranks; one that is used every other time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(700, 130)
        self.norm = nn.LayerNorm(130)
        self.wide = nn.Linear(130, 3).double()
        self.narrow = nn.Linear(130, 5).bfloat16()
        self.turn = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.seldom = nn.Linear(130, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x))) * self.scale
        loss = self.wide(hidden.double()).square().mean().float()
        loss = loss + self.narrow(hidden.bfloat16()).float().square().mean()
        loss = loss + torch.view_as_real(self.turn).square().mean()
        self.calls += 1
        return loss + self.seldom(hidden).mean() if self.calls % 2 else loss


def _pair(make: Callable[..., Any], **defaults: Any) -> list[tuple[Mixed, Any]]:
    """Makes one model twice: with and without the fused step."""
    models = [Mixed(), Mixed()]
    return [
        (model, make(model.parameters(), stage=2, fused_step=fused, **defaults))
        for model, fused in zip(models, (False, True), strict=True)
    ]


def _adamw(parameters: Any, **options: Any) -> trireme.ZeroRedundancyOptimizer:
    return trireme.ZeroRedundancyOptimizer(parameters, trireme.optim.AdamW, lr=1e-2, **options)


def _without_gradients(model: nn.Module) -> bool:
    return all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world", backend="trireme")
def test_the_same_bits_whatever_comes_between(rank: int, world: int, amsgrad: bool) -> None:
    pair = _pair(_adamw, amsgrad=amsgrad)
    generator = torch.Generator().manual_seed(rank)
    for step in range(14):
        inputs = [torch.randn(4, 700, generator=generator) for _ in range(2)]
        for fused, (model, optimizer) in enumerate(pair):
            optimizer.zero_grad()
            if step == 4:
                with optimizer.no_sync():
                    model(inputs[1]).backward()
            model(inputs[0]).backward()
            if step == 6:  # a second backward makes the sums of the first
                model(inputs[1]).backward()
            if step == 8:
                trireme.clip_grad_norm_(model.parameters(), 0.1)
            if step == 10:  # forgotten
                optimizer.zero_grad()
                model(inputs[1]).backward()
            deferred = step not in (0, 6, 8)
            assert _without_gradients(model) == bool(fused and deferred), step
            optimizer.step()
        for plain, other in zip(pair[0][0].parameters(), pair[1][0].parameters(), strict=True):
            assert torch.equal(plain, other), step
    states = []
    for _, optimizer in pair:
        optimizer.consolidate_state_dict()
        if rank == 0:
            states.append(optimizer.state_dict()["state"])
    for index in states[0] if rank == 0 else ():
        for name, value in states[0][index].items():
            assert torch.equal(value, states[1][index][name]), (index, name)


@on_ranks(2, backend="trireme")
def test_groups_with_settings_of_their_own(rank: int) -> None:
    models = [Mixed(), Mixed()]
    optimizers = []
    for model, fused in zip(models, (False, True), strict=True):
        early = {"params": [*model.first.parameters()], "lr": 0.1}
        rest = {"params": [*model.norm.parameters(), model.scale], "weight_decay": 0.3}
        optimizer = _adamw([early, rest], stage=2, fused_step=fused)
        optimizer.add_param_group({"params": [*model.wide.parameters()], "betas": (0.5, 0.9)})
        optimizers.append(optimizer)
    for _ in range(5):
        x = torch.randn(4, 700)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        for plain, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(plain, other)


@on_ranks(2, backend="trireme")
def test_a_grad_scaler_skips_on_all_ranks(rank: int) -> None:
    model = Mixed()
    optimizer = _adamw(model.parameters(), stage=2, fused_step=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        before = model.first.weight.clone()
        loss = model(torch.randn(4, 700))
        factor = float("inf") if step == 1 and rank == 1 else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.first.weight) == (step == 1)
    assert scaler.get_scale() == 2.0


@on_ranks(2, backend="trireme")
def test_unscaling_before_the_step_is_refused(rank: int) -> None:
    model = Mixed()
    optimizer = _adamw(model.parameters(), stage=2, fused_step=True)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 700))).backward()
    scaler.unscale_(optimizer)
    with raises(RuntimeError, "unscale_", "fused_step"):
        scaler.step(optimizer)


@on_ranks(2, backend="trireme")
def test_only_with_our_own_adam_and_stage_2(rank: int) -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    with raises(ValueError, "fused_step=True for stage 1"):
        _adamw(parameters, stage=1, fused_step=True)
    with raises(ValueError, "AdamW"):
        trireme.ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, stage=2, fused_step=True, lr=0.1
        )
