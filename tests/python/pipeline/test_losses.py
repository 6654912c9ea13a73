"""Parts of the loss in any stage; inputs and targets for any stage that asks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from ddp.ranks import RANKLESS_FORM, raises
from pipeline.ranks import WIDTH, rows, tanh_layers
from shm.ranks import on_shm_and_gloo_ranks, on_shm_ranks

CHUNKS = 4
FORMS = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v")


class Expert(nn.Module):
    """A layer with a part of the loss."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(WIDTH, WIDTH), weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        trireme.pipeline_loss(y.square().mean(), self.weight)
        return y.tanh()


def experts() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Expert(0.1), nn.Linear(WIDTH, WIDTH), Expert(0.2), Expert(0.3))


def accumulate(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = []
    for part, wanted in zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True):
        with trireme.collect_losses() as collected:
            loss = mse_loss(module(part), wanted)
        loss = loss + collected.total()
        (loss / CHUNKS).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("schedule", FORMS)
@on_shm_and_gloo_ranks(2, timeout=60)
def test_parts_of_the_loss(rank: int, schedule: str) -> None:
    one = experts()
    pipe = trireme.Pipeline(experts(), CHUNKS, ranks=True, schedule=schedule, loss=mse_loss)
    for step in range(2):
        one.zero_grad()
        pipe.zero_grad()
        x, y = rows(2 * step), rows(2 * step + 1)
        expected = accumulate(one, x, y)
        torch.testing.assert_close(pipe.step(x, target=y), expected)
        whole = dict(one.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, whole[name].grad)
    torch.testing.assert_close(pipe.eval_step(x, target=y), expected)
    assert (pipe.eval_step(x) is None) == (pipe.stages[-1].rank != rank)


@on_shm_ranks(2, timeout=60)
def test_a_frozen_front_and_a_recomputation(rank: int) -> None:
    """A stage whose input needs no gradient has a part; a recomputed one does not count twice."""

    class Recomputed(Expert):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def make() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), Recomputed(0.5))

    one, pipe = make(), trireme.Pipeline(make(), CHUNKS, ranks=True, loss=mse_loss)
    expected = accumulate(one, rows(1), rows(2))
    torch.testing.assert_close(pipe.step(rows(1), target=rows(2)), expected)
    whole = dict(one.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad)


def test_outside_of_pipelines() -> None:
    layer, x = Expert(2.0), rows(3)
    with raises(ValueError, "a part of the loss outside of a pipeline's step", form=RANKLESS_FORM):
        layer(x)
    with torch.no_grad():
        layer(x)
    with trireme.collect_losses() as outer, trireme.collect_losses() as inner:
        layer(x)
    assert outer.total() == 0.0
    torch.testing.assert_close(inner.total(), 2 * layer.linear(x).square().mean())
    with raises(ValueError, "that is no real number", form=RANKLESS_FORM):
        trireme.pipeline_loss(torch.zeros(2))


class Masked(nn.Module):
    """Takes two inputs in the first stage, and asks for them again in a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor, target: Tensor | None = None) -> Tensor:
        hidden = self.linear(hidden) * mask
        return hidden if target is None else hidden + target


class AsksForAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return self.linear(x) * mask + hidden - target


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@on_shm_and_gloo_ranks(2, timeout=60)
def test_any_stage_asks_for_inputs_and_targets(rank: int, schedule: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(9)
        return nn.Sequential(Masked(), nn.Tanh(), AsksForAll())

    one = make()
    pipe = trireme.Pipeline(make(), CHUNKS, ranks=True, schedule=schedule, loss=mse_loss)
    x, mask, y = rows(1), rows(2).sign(), rows(3)
    losses: list[Any] = []
    for a, m, t in zip(*(each.tensor_split(CHUNKS) for each in (x, mask, y)), strict=True):
        losses.append(mse_loss(one[2](one[1](one[0](a, m, t)), a, m, t), t))
        losses[-1].backward()
    got = pipe.step(x, mask, target=y)
    torch.testing.assert_close(got, torch.stack(losses).mean().detach())
    whole = dict(one.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad / CHUNKS)
    torch.testing.assert_close(pipe.step(x, mask=mask, target=y), got)


@on_shm_ranks(2, timeout=60)
def test_the_last_layer_is_the_loss(rank: int) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return mse_loss(x, target)

    x, y = rows(1), rows(2)
    plain = trireme.Pipeline(tanh_layers(4), CHUNKS, ranks=True, loss=mse_loss)
    pipe = trireme.Pipeline(nn.Sequential(*tanh_layers(4), Loss()), CHUNKS, ranks=True)
    assert torch.equal(pipe.step(x, target=y), plain.step(x, target=y))
    assert torch.equal(pipe.eval_step(x, target=y), plain.eval_step(x, target=y))
