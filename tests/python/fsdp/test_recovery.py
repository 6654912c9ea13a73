"""What an exception on all ranks leaves behind, a graph that outlives its parameters, and models of
which ranks let go at other times."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.ranks import pair, shard_layers, train_both, train_by_rank
from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_gloo_ranks, on_shm_ranks


class Failing(nn.Module):
    """mlp() with an exception in forward or backward when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body[1](self.body[0](x))
        if self.where == "forward":
            raise ArithmeticError("in forward")
        if self.where == "backward":
            hidden.register_hook(_fail)
        return self.body[4](self.body[3](self.body[2](hidden)))


def _fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("in backward")


def shard_body(model: Any) -> None:
    shard_layers(model.body)
    trireme.fully_shard(model)


@on_shm_ranks(2)
def test_training_goes_on_after_an_exception(rank: int) -> None:
    """On all ranks, in forward and backward, with gradients accumulated before."""
    ours, one = pair(Failing, shard=shard_body)
    for step, where in enumerate(("forward", "backward", "backward", "forward")):
        train_both(ours, one, step)
        ours.optimizer.zero_grad()
        if step % 2:
            ours.backward(17, sync=False)
        ours.model.where = where
        with pytest.raises(ArithmeticError, match=where):
            ours.loss(20).backward()
        ours.model.where = ""
        with raises(RuntimeError, "of an inner unit"):
            ours.model.body[0].reset_iter_state()
        ours.model.reset_iter_state()
        assert all(isinstance(param, DTensor) for param in ours.model.parameters())
        train_both(ours, one, step + 7)


@on_shm_ranks(2)
def test_exceptions_without_a_reset(rank: int) -> None:
    """What one forward left does no harm to the next; a backward drops what it has."""
    ours, one = pair(Failing, shard=shard_body)
    for step, where in enumerate(("forward", "backward")):
        train_both(ours, one, step)
        ours.optimizer.zero_grad()
        ours.model.where = where
        with pytest.raises(ArithmeticError, match=where):
            ours.loss(20).backward()
        ours.model.where = ""
        train_both(ours, one, step + 7)


class Picky(nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        if self.fails:
            raise ValueError("not to my taste")
        return hidden


class Forgiving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.picky, self.last = nn.Linear(6, 6), Picky(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        hidden = self.first(x)
        self.picky.fails = fails
        with contextlib.suppress(ValueError):
            hidden = hidden + self.picky(hidden)
        return self.last(hidden.tanh())


@on_shm_ranks(2)
def test_a_unit_raises_inside_a_forward_that_goes_on(rank: int) -> None:
    """On all ranks, also in the first forward, or on one of them."""
    for failing in ([(0, 1), (), (1,), (0, 1), (0,)], [(1,), (), (0, 1)]):
        ours, one = pair(Forgiving)
        for step, ranks in enumerate(failing):
            train_by_rank(ours, one, step, [other in ranks for other in range(2)])
            assert all(isinstance(param, DTensor) for param in ours.model.parameters())


@on_gloo_ranks(2)
def test_ranks_let_go_of_a_model_at_other_times(rank: int) -> None:
    """Its communicator goes with it, on one rank; what ranks know of their group does not."""
    kept = []
    for _ in range(2):
        model = trireme.fully_shard(nn.Linear(256, 256))  # gathers more than 64 KiB
        model(torch.ones(2, 256)).sum().backward()
        assert model.weight.grad is not None
        if rank == 0:
            kept.append(model)
        del model
        gc.collect()
