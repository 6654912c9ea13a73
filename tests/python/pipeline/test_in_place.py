"""First layers that work in place on micro-batches, which are pieces of one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss
from trireme import pipelining

from harness.on_ranks import on_shm_ranks
from pipeline.ranks import WIDTH, accumulate, rows

CHUNKS = 4
FORMS = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Shifts(nn.Module):
    """Takes the batch once more, and saves it for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + self.linear(x)


class Named(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


def layers() -> nn.Sequential:
    torch.manual_seed(4)
    made = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.ReLU(inplace=True), *made)


def compare(form: str, **options: Any) -> None:
    one, net = layers(), layers()
    pipe = trireme.Pipeline(net, CHUNKS, schedule=form, loss=mse_loss, **options)
    for step in range(2):
        x, y = rows(step), rows(step + 5)
        given = x.clone()
        one.zero_grad()
        pipe.zero_grad()
        wanted = accumulate(one, x.clone(), y, chunks=CHUNKS, loss=mse_loss)
        version = given._version
        assert torch.equal(pipe.step(given, target=y), wanted)
        theirs = dict(one.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, theirs[name].grad)
        if pipe._calls[0].stage.number == 0:
            assert given._version > version  # who has saved it hears of the change


@pytest.mark.parametrize("form", FORMS)
def test_in_threads(form: str) -> None:
    compare(form, devices=["cpu"] * 2)


@on_shm_ranks(2)
def test_on_ranks(rank: int) -> None:
    for form in FORMS:
        compare(form, ranks=True)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_by_a_call(needs_gradient: bool) -> None:
    one, net = layers(), layers()
    pipe = trireme.Pipeline(net, CHUNKS, devices=["cpu"] * 2)
    x, y = rows(0), rows(1)
    found = []
    for module in (pipe, one):
        given = x.clone()
        leaf = given.requires_grad_(needs_gradient)
        entered = leaf.clone() if needs_gradient else given
        mse_loss(module(entered), y).backward()
        found.append([leaf.grad, *(parameter.grad for parameter in net.parameters())])
        if module is one:
            found[-1][1:] = [parameter.grad for parameter in one.parameters()]
    for got, wanted in zip(*found, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted)


def changed_by_caller(x: Tensor) -> None:
    x.add_(1)


def changed_by_layer(x: Tensor) -> None:
    trireme.Pipeline(nn.Sequential(Doubles(), nn.Tanh()), 2, devices=["cpu"] * 2)(x)


@pytest.mark.parametrize("change", [changed_by_caller, changed_by_layer])
def test_a_change_of_what_a_graph_needs_is_found(change: Callable[[Tensor], None]) -> None:
    """Between a call and its backward, by the caller or by another pipeline."""
    pipe = trireme.Pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), CHUNKS,
                            devices=["cpu"] * 2)  # fmt: skip
    x = rows(0)
    out = pipe(x).sum()
    change(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    x = rows(0)
    outside = (x * torch.ones((), requires_grad=True)).sum()
    change(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outside.backward()


def test_layers_that_get_the_same_tensor_see_each_other_s_changes() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Shifts(), Spoils())
    pipe = trireme.Pipeline(net, 2, devices=["cpu"] * 3, loss=mse_loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pipe.step(rows(0), target=rows(1), x=rows(2))


class Spoils(nn.Module):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.add_(1)
        return h


@on_shm_ranks(2)
def test_stages_of_torch_s_names(rank: int) -> None:
    one, net = layers(), layers()
    stage = pipelining.PipelineStage(net[:5] if rank == 0 else net[5:], rank, 2,
                                     torch.device("cpu"))  # fmt: skip
    assert isinstance(stage, PipelineStage)
    schedule = pipelining.ScheduleGPipe(stage, CHUNKS, loss_fn=mse_loss)
    x, y = rows(0, 8), rows(1, 8)
    accumulate(one, x.clone(), y, chunks=CHUNKS, loss=mse_loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)
    theirs = dict(one.named_parameters())
    own = stage.submod.named_parameters()
    for name, parameter in own:
        assert torch.equal(parameter.grad, theirs[name].grad)
