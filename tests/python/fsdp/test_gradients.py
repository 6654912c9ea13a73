"""Which gradients a rank has when backward returns, whatever forwards and backwards were like."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

from fsdp.models import Skipping
from fsdp.ranks import (
    assert_parts,
    in_training,
    local,
    pair,
    rows_of,
    shard_layers,
    step_both,
    torch_pair,
    train_both,
    train_by_rank,
)
from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import ROWS, Training, alone, assert_close

SMALL_WORLDS = pytest.mark.parametrize("world", [2, 3])


@on_shm_and_gloo_ranks(2, fresh=True)  # a process is warned once
def test_create_graph_brings_averages_without_a_graph(rank: int) -> None:
    ours, one = pair(mlp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            for training in (ours, one):
                training.optimizer.zero_grad()
                if training is ours:
                    ours.model.set_requires_gradient_sync(False)
                training.loss(2 * step).backward(create_graph=True)
                ours.model.set_requires_gradient_sync(True)
                training.loss(2 * step + 1).backward(create_graph=True)
            assert not any(it.grad.requires_grad for it in ours.model.parameters())
            for other in one.model.parameters():
                other.grad = other.grad.detach()
            step_both(ours, one)
    said = [str(it.message) for it in caught if "[fully_shard]" in str(it.message)]
    assert len(said) == (rank == 0) and all("has no graph" in text for text in said)


@on_shm_ranks(2)
def test_accumulation_as_torch(rank: int) -> None:
    """Without averaging .grad stays as it was; both count what one step left for the next."""
    ours, theirs = torch_pair(mlp)
    for step in range(4):
        for training in (ours, theirs):
            training.backward(3 * step, sync=False)
            grads = [param.grad for param in training.model.parameters()]
            assert all((grad is None) == (step == 0) for grad in grads)
            training.backward(3 * step + 1, 3 * step + 2)
            training.optimizer.step()
        for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            assert isinstance(one.grad, DTensor) and one.grad.placements == other.grad.placements
            assert_close("grad", local(one.grad), local(other.grad))


@on_shm_ranks(2)
def test_hooks(rank: int) -> None:
    """On sharded parameters, after they have their gradient: also steps that are taken there."""
    ours, one = pair(mlp)
    seen: list[tuple[str, bool]] = []

    for training in (ours, one):
        for name, param in training.model.named_parameters():

            def double(param: torch.Tensor, name: str = name) -> None:
                seen.append((name, isinstance(param.grad, DTensor)))
                param.grad.mul_(2)

            param.register_post_accumulate_grad_hook(double)
    names = [name for name, _ in one.model.named_parameters()]
    for step in range(3):
        seen.clear()
        train_both(ours, one, step)
        assert sorted(seen) == sorted(
            (name, sharded) for name in names for sharded in (False, True)
        )


@on_shm_ranks(2)
def test_hooks_of_modules(rank: int) -> None:
    """Around forward and backward of units, registered before and after sharding."""
    seen: list[tuple[str, bool]] = []

    def hook(name: str) -> Callable[..., None]:
        def see(layer: nn.Module, *_: Any) -> None:
            seen.append((name, isinstance(layer.weight, DTensor)))

        return see

    def shard(model: nn.Module) -> None:
        model[2].register_forward_pre_hook(hook("before forward"))
        model[2].register_full_backward_hook(hook("after backward"))
        shard_layers(model)
        model[2].register_full_backward_pre_hook(hook("before backward"))

    ours, one = pair(mlp, shard=shard)
    for step in range(3):
        seen.clear()
        train_both(ours, one, step)
        assert seen[0] == ("before forward", False)
        assert [name for name, _ in seen] == ["before forward", "before backward", "after backward"]


@on_shm_ranks(2)
def test_an_optimizer_step_in_backward(rank: int) -> None:
    """One optimizer per parameter, stepped and zeroed by its hook."""
    ours, one = pair(mlp)
    handles = []
    for training in (ours, one):
        for param in training.model.parameters():
            own = SGD([param], lr=0.1)

            def step_now(param: torch.Tensor, own: Any = own) -> None:
                own.step()
                own.zero_grad()

            handles.append(param.register_post_accumulate_grad_hook(step_now))
    for step in range(4):
        for training in (ours, one):
            training.backward(step)
        assert_parts(ours, one)
    for handle in handles:  # each parameter would hold itself otherwise, by its optimizer
        handle.remove()


@SMALL_WORLDS
@on_shm_ranks("world")
def test_what_some_or_all_ranks_skip(rank: int, world: int) -> None:
    """A rank that skips contributes zeros; what all of them skip has no gradient."""
    ways = [
        ("abc", "abc"),
        ("ab", "abc"),
        ("abs", "bc"),
        ("a", "a"),
        ("cba", "abc"),
        ("s", "b"),
        ("b", "b"),
        ("abcs", "abcs"),
    ]
    for shard in (shard_layers, trireme.fully_shard):
        ours, one = pair(Skipping, AdamW, shard, lr=0.01)
        for step, way in enumerate(ways):
            train_by_rank(ours, one, step, [way[other % 2] for other in range(world)])


@on_shm_ranks(2)
def test_a_rank_whose_loss_uses_no_parameter(rank: int) -> None:
    ours, one = pair(mlp)
    for step in range(4):
        for training in (ours, one):
            training.optimizer.zero_grad()
        loss = ours.loss(step)
        (loss * 0 if step % 2 == rank else loss).backward()
        used = 1 - step % 2
        (one.model(batch(step, rows=ROWS)[used::2]).square().mean() / 2).backward()
        step_both(ours, one)


@on_shm_ranks(2)
def test_parameters_frozen_while_they_are_unsharded(rank: int) -> None:
    """They are so on one rank only: it has evaluated since the step."""
    ours, one = pair(mlp, options={"reshard_after_forward": False})
    for step, frozen in enumerate((True, False, True, False)):
        if rank == step // 2:
            with torch.no_grad():
                ours.loss(9)
        for training in (ours, one):
            training.model[2].requires_grad_(not frozen)
        train_both(ours, one, step)
        assert (ours.model[2].weight.grad is None) == frozen


@on_shm_ranks(2)
def test_manual_finalization(rank: int) -> None:
    """Backwards accumulate; finalize_backward() averages, as often as it is called."""
    ours, one = pair(mlp)
    with raises(RuntimeError, "without manual finalization"):
        ours.train(0)
        ours.model.finalize_backward()
    one.train(0)
    ours.model.set_manual_backward_finalization(True)
    for step in range(1, 4):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
            if training is ours:
                assert all(param.grad is None for param in ours.model.parameters())
            training.backward(step + 1)
        if step == 2:
            ours.model.finalize_backward(async_op=True).wait()
        else:
            ours.model.finalize_backward()
        step_both(ours, one)
    ours.model.set_manual_backward_finalization(False)
    train_both(ours, one, 9)


@on_shm_ranks(2)
def test_units_run_by_themselves(rank: int) -> None:
    """A model that is no unit: each of its children is a root."""

    def shard(model: nn.Module) -> None:
        for layer in (model[0], model[2], model[4]):
            trireme.fully_shard(layer)

    def backward(training: Training, number: int) -> None:
        training.model(rows_of(number, training)).square().mean().backward()

    model = mlp()
    shard(model)
    ours, one = in_training(model), alone(mlp, SGD, lr=0.1, momentum=0.9)
    for step in range(4):
        for training in (ours, one):
            training.optimizer.zero_grad()
            backward(training, step)
        step_both(ours, one)
