"""Stage 2: which gradients a rank has when backward returns, whatever the backwards were like."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import (
    ROWS,
    Training,
    accumulate_both,
    alone,
    assert_close,
    assert_equal_parameters,
    backward_by_rank,
)
from zero.ranks import Zero, own_parts, sharded


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Training, Training]:
    """Stage 2, and one process."""
    return sharded(make, SGD, 2, options, lr=0.1, momentum=0.9), alone(
        make, SGD, lr=0.1, momentum=0.9
    )


def assert_gradients(ours: Training, one: Training) -> None:
    expected = own_parts(ours, [parameter.grad for parameter in one.model.parameters()])
    for (name, parameter), right in zip(ours.model.named_parameters(), expected, strict=True):
        assert_close(name, parameter.grad, right)


def step_both(ours: Training, one: Training) -> None:
    assert_gradients(ours, one)
    for training in (ours, one):
        training.optimizer.step()
    assert_equal_parameters(ours.model, one.model)


@on_shm_and_gloo_ranks(2, fresh=True)  # a process is warned once
def test_create_graph_brings_averages_without_a_graph(rank: int) -> None:
    ours, one = pair(mlp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            for training in (ours, one):
                training.optimizer.zero_grad()
                with ours.optimizer.no_sync() if training is ours else nullcontext():
                    training.loss(2 * step).backward(create_graph=True)
                training.loss(2 * step + 1).backward(create_graph=True)
            for parameter, other in zip(
                ours.model.parameters(), one.model.parameters(), strict=True
            ):
                assert not parameter.grad.requires_grad
                other.grad = other.grad.detach()
            step_both(ours, one)
    said = [str(it.message) for it in caught if "[zero]" in str(it.message)]
    assert len(said) == (rank == 0) and all("has no graph" in text for text in said)


@on_shm_ranks(2)
def test_gradients_of_this_rank_are_its_own_until_they_are_averaged(rank: int) -> None:
    ours, _ = pair(mlp)
    for _ in range(2):
        ours.optimizer.zero_grad()
        with ours.optimizer.no_sync():
            ours.loss(0).backward()
        here = mlp()
        here.load_state_dict({name: v.clone() for name, v in ours.model.state_dict().items()})
        here(batch(0, rows=ROWS)[rank::2]).square().mean().backward()
        for parameter, right in zip(ours.model.parameters(), here.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, right.grad)
        ours.backward(1)
        ours.optimizer.step()
    ours.optimizer.zero_grad()
    ours.backward(0)
    with ours.optimizer.no_sync():
        ours.loss(1).backward()
    with raises(RuntimeError, "no_sync", "not the average"):
        ours.optimizer.step()
    ours.train(2)


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_a_group_that_was_added_later(rank: int, world: int) -> None:
    """It has a reducer of its own; both are armed by whichever gradient comes first."""
    model = mlp()
    optimizer = Zero(model[:3].parameters(), SGD, stage=2, lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": model[3:].parameters()})
    ours = Training(model, model, optimizer, rank, world)
    accumulate_both(ours, alone(mlp, SGD, lr=0.1, momentum=0.9), step_both)


class Swapped(nn.Module):
    """Two layers in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        return self.layers[1 - first](self.layers[first](x).tanh())


@on_shm_and_gloo_ranks(2)
def test_groups_that_ranks_come_by_in_different_orders(rank: int) -> None:
    model = Swapped()
    optimizer = Zero(model.layers[0].parameters(), SGD, stage=2, lr=0.1)
    optimizer.add_param_group({"params": model.layers[1].parameters()})
    ours, one = Training(model, model, optimizer, rank, 2), alone(Swapped, SGD, lr=0.1)
    for step in range(4):
        for training in (ours, one):
            training.optimizer.zero_grad()
        backward_by_rank(ours, one, step, (0, 1))
        for training in (ours, one):
            training.optimizer.step()
        assert_equal_parameters(model, one.model)
