"""Hooks on parameters: each changes gradients as in one process, whenever it was registered."""

from __future__ import annotations

import torch
from torch import nn

from contract.strategies import Strategy, on_every_strategy
from fsdp.ranks import pair, train_both
from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_shm_ranks


def double(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


def triple(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def hooked() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(double)
    model[0].bias.register_post_accumulate_grad_hook(triple)
    return model


@on_every_strategy(needs=["ranks", "passes"])
def test_hooks_change_gradients(rank: int, strategy: Strategy) -> None:
    ours, one = strategy.pair(hooked)
    handles, seen = [], []
    for training in (ours, one):
        weight, bias = training.model[4].weight, training.model[4].bias
        handles.append(weight.register_hook(double))
        handles.append(weight.register_hook(lambda gradient: seen.append(gradient.shape)))
        handles.append(bias.register_post_accumulate_grad_hook(triple))
    for step in range(3):
        strategy.train_both(ours, one, step)
    assert seen == [torch.Size([3, 5])] * 6
    for handle in handles:
        handle.remove()
    strategy.train_both(ours, one, 3)
    assert len(seen) == 6


@on_every_strategy(needs=["ranks", "passes"])
def test_hooks_before_and_after_an_accumulation(rank: int, strategy: Strategy) -> None:
    """A tensor hook changes what comes, and not what is in .grad already."""
    ours, one = strategy.pair(hooked)
    for training in (ours, one):
        training.model[4].weight.register_hook(double)
        training.optimizer.zero_grad()
        training.model[0].bias._post_accumulate_grad_hooks.clear()
        for number in range(2):
            training.backward(number)
        training.backward(2, sync=False)
        training.backward(3)
    strategy.step_both(ours, one)


@on_shm_ranks(2)
def test_what_a_hook_on_a_shard_may_not_return(rank: int) -> None:
    ours, one = pair(mlp)
    weight = ours.model[0].weight
    for wrong, kind, text in (
        (lambda gradient: gradient.to_local(), TypeError, "got Tensor from a hook on '0.weight'"),
        (lambda gradient: gradient.double(), RuntimeError, "got torch.float64 of shape (13, 6)"),
    ):
        handle = weight.register_hook(wrong)
        with raises(kind, f"[fully_shard] {text}", f"(rank {rank} of 2)"):
            ours.backward(0)
        handle.remove()
        train_both(ours, one, 1)
