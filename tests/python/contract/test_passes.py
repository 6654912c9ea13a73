"""Forwards and backwards that come in any order, again, or not at all: as in one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from contract.strategies import Strategy, on_every_strategy
from harness.models import batch, mlp
from harness.training import ROWS, Training


def has_shards(training: Training) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in training.model.parameters())


@on_every_strategy(needs=("passes",))
def test_several_forwards_before_backwards(rank: int, strategy: Strategy) -> None:
    """One backward of all of them, or one of each, in any order."""
    ours, one = strategy.pair(mlp)
    for order in (None, [0, 1, 2], [2, 1, 0], None, [1, 0, 2]):
        for training in (ours, one):
            training.optimizer.zero_grad()
            losses = [(1 + number) * training.loss(number) for number in range(3)]
            for number in order or ():
                losses[number].backward()
            if order is None:
                torch.stack(losses).sum().backward()
        strategy.step_both(ours, one)


@on_every_strategy(needs=("passes",))
def test_forwards_and_backwards_in_turns(rank: int, strategy: Strategy) -> None:
    """One forward ahead: f0 f1 b0 f2 b1 f3 b2 b3."""
    ours, one = strategy.pair(mlp)
    for first in (0, 10):
        for training in (ours, one):
            training.optimizer.zero_grad()
            ahead = training.loss(first)
            for number in range(first + 1, first + 4):
                loss, ahead = ahead, training.loss(number)
                loss.backward()
            ahead.backward()
        strategy.step_both(ours, one)


@on_every_strategy(needs=("passes",))
def test_several_backwards_of_one_forward(rank: int, strategy: Strategy) -> None:
    """Also of several losses of one output; after each of them gradients are complete."""
    ours, one = strategy.pair(mlp)
    for _ in range(2):
        for training in (ours, one):
            training.optimizer.zero_grad()
        losses = [training.loss(0) for training in (ours, one)]
        for factor in (1, 3, 2):
            for loss in losses:
                (factor * loss).backward(retain_graph=factor != 2)
            strategy.assert_gradients(ours, one)
        strategy.step_both(ours, one)


@on_every_strategy(needs=("passes",))
def test_forwards_without_backwards(rank: int, strategy: Strategy) -> None:
    """With and without a graph: before the backward, between it and the step, after the step."""
    ours, one = strategy.pair(mlp)
    for step in range(4):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.loss(50)
            loss = training.loss(step)
            with torch.no_grad():
                training.loss(51)
            loss.backward()
            training.loss(60)
        strategy.step_both(ours, one)
        with torch.no_grad():
            ours.loss(70)


@on_every_strategy(needs=("passes", "runs_alone"))
def test_one_rank_evaluates_alone(rank: int, strategy: Strategy) -> None:
    """Between forward and backward, and between two backwards of one graph."""
    ours, one = strategy.pair(mlp)
    for step in range(3):
        for training in (ours, one):
            training.optimizer.zero_grad()
            loss = training.loss(step)
            for factor in (1, 3):
                if training is ours and rank == step % ours.world:
                    with torch.no_grad():
                        ours.loss(8)
                    ours.loss(7)
                (factor * loss).backward(retain_graph=factor == 1)
        strategy.step_both(ours, one)


@on_every_strategy(needs=("passes",))
def test_derivatives_move_no_gradient(rank: int, strategy: Strategy) -> None:
    """Those of inputs, and of parameters but where these are in the graph as shards only."""
    ours, one = strategy.pair(mlp)
    for step in range(3):
        derivatives = []
        for training in (ours, one):
            training.optimizer.zero_grad()
            loss = training.loss(step)
            rows = batch(9, rows=ROWS).requires_grad_()
            of = [rows, *(() if has_shards(ours) else training.model.parameters())]
            derivatives.append(torch.autograd.grad(training.net(rows).sum(), of))
            assert all(parameter.grad is None for parameter in training.model.parameters())
            loss.backward()
        torch.testing.assert_close(*derivatives)
        strategy.step_both(ours, one)


@on_every_strategy(needs=("passes",))
def test_a_graph_that_was_kept_over_a_step(rank: int, strategy: Strategy) -> None:
    """Its backward raises on all ranks; where ranks share memory all go on."""
    ours, one = strategy.pair(mlp)
    for step in range(2) if strategy.recovers else range(1):
        for training in (ours, one):
            training.train(step)
            kept = training.loss(1)
            if step == 1:  # it was walked before, too
                kept.backward(retain_graph=True)
            training.train(step)
            if step == 0:  # a forward after the step changes nothing
                with torch.no_grad():
                    training.loss(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.backward()
        for after in (10, 11) if strategy.recovers else ():
            strategy.train_both(ours, one, after)
