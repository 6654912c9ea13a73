"""Clipping and scaling under ZeroRedundancyOptimizer: the numbers of one process, or an error."""

from __future__ import annotations

import math
from typing import Any

import torch
import trireme
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

from harness.faults import RANKLESS_FORM, raises
from harness.models import Shapes, batch, mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import (
    Training,
    alone,
    assert_equal_parameters,
    assert_same_on_all_ranks,
    values,
)
from zero.ranks import DDP, STAGES, Zero, sharded

NORMS = (2.0, 1.0, 0.5, 3.5, -1.0, math.inf, -math.inf)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
torch_clip = torch.nn.utils.clip_grad_norm_


def pair(stage: int, make: Any = mlp) -> tuple[Training, Training]:
    return alone(make, AdamW, lr=0.01), sharded(make, AdamW, stage, lr=0.01)


# --- Clipping -------------------------------------------------------------------------------------


@on_shm_and_gloo_ranks(2)
def test_clipping_by_every_norm(rank: int) -> None:
    """Shards, scalars, parameters without elements and two dtypes; by much and not at all."""
    for stage in (1, 2):
        one, ours = pair(stage, Shapes)
        for step, norm_type in enumerate(NORMS):
            for max_norm in (0.1, 1e6):
                for training in (one, ours):
                    training.optimizer.zero_grad()
                    training.backward(step)
                norm = trireme.clip_grad_norm_(exact(ours.model), max_norm, norm_type)
                # torch has no infinite norm of a tensor without elements.
                held = [parameter for parameter in exact(one.model) if parameter.numel() > 0]
                expected = torch_clip(held, max_norm, norm_type)
                torch.testing.assert_close(norm.double(), expected.double(), **CLOSE)
                assert_same_on_all_ranks([norm])
                one.optimizer.step()
                ours.optimizer.step()
        torch.testing.assert_close(exact(ours.model), exact(one.model), **CLOSE)
        assert_same_on_all_ranks(list(ours.model.parameters()))


def exact(model: nn.Module) -> list[torch.Tensor]:
    """The parameters whose gradients are those of one process but for the order of sums."""
    return [parameter for parameter in model.parameters() if parameter.dtype != torch.bfloat16]


@on_shm_ranks(3)
def test_parameters_of_several_strategies_have_one_norm(rank: int) -> None:
    """DDP, stage 1 and two optimizers of stage 2 in one call, in any order."""
    one, ours = mlp(), mlp()
    whole = DDP(ours[0])
    first = Zero(ours[0].parameters(), SGD, lr=0.1)
    second = Zero(ours[2].parameters(), SGD, stage=2, lr=0.1)
    third = Zero(ours[4].parameters(), SGD, stage=2, lr=0.1)
    net = nn.Sequential(whole, *ours[1:])
    alone_optimizer = SGD(one.parameters(), lr=0.1)
    for step, norm_type in enumerate(NORMS):
        optimizers: list[Any] = [first, second, third]
        for optimizer in (*optimizers, alone_optimizer):
            optimizer.zero_grad()
        one(batch(step, rows=12)).square().mean().backward()
        net(batch(step, rows=12)[rank::3]).square().mean().backward()
        mixed = [ours[4].bias, *ours[:3].parameters(), ours[4].weight]
        norm = trireme.clip_grad_norm_(mixed, 0.05, norm_type)
        expected = torch_clip(one.parameters(), 0.05, norm_type)
        torch.testing.assert_close(norm, expected, **CLOSE)
        for optimizer in (*optimizers, alone_optimizer):
            optimizer.step()
        assert_equal_parameters(ours, one)


@on_shm_ranks(2)
def test_clipping_some_parameters(rank: int) -> None:
    """One tensor, a generator, the optimizer's own method; twice; without gradients."""
    for stage in (1, 2):
        one, ours = pair(stage)
        assert ours.optimizer.clip_grad_norm_(0.1) == 0
        assert trireme.clip_grad_norm_([], 1.0) == torch_clip([], 1.0)
        for step in range(3):
            for training in (one, ours):
                training.optimizer.zero_grad()
                training.backward(step)
            weight = trireme.clip_grad_norm_(ours.model[0].weight, 0.01)
            torch.testing.assert_close(weight, torch_clip(one.model[0].weight, 0.01))
            rest = trireme.clip_grad_norm_(ours.model[2].parameters(), 0.01)
            torch.testing.assert_close(rest, torch_clip(one.model[2].parameters(), 0.01))
            both = ours.optimizer.clip_grad_norm_(0.02, norm_type=1.0)
            torch.testing.assert_close(both, torch_clip(one.model.parameters(), 0.02, 1.0))
            one.optimizer.step()
            ours.optimizer.step()
            assert_equal_parameters(ours.model, one.model)


@on_shm_ranks(2)
def test_a_norm_that_is_not_finite(rank: int) -> None:
    """In what one rank owns: raised on all ranks if asked for; else the norm says it on all."""
    for stage in (1, 2):
        ours = sharded(mlp, SGD, stage, lr=0.1)
        for value in (math.inf, math.nan):
            ours.optimizer.zero_grad()
            loss = ours.net(batch(0)[rank::2]).square().mean()
            factor = value if rank == 1 else 1.0
            (loss + factor * ours.model[0].weight[0].sum()).backward()
            text = "[grad_norm] got gradients whose norm is not finite"
            with raises(RuntimeError, text, form=RANKLESS_FORM):
                ours.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
            assert not math.isfinite(ours.optimizer.clip_grad_norm_(1.0))
        with raises(ValueError, "[grad_norm] got NaN as norm_type", form=RANKLESS_FORM):
            ours.optimizer.clip_grad_norm_(1.0, norm_type=math.nan)
        if stage == 2:
            text = "[grad_norm] got norm_type 0, which counts gradients, for sharded ones"
            with raises(ValueError, text, "Pass 2 for", form=RANKLESS_FORM):
                ours.optimizer.clip_grad_norm_(1.0, norm_type=0)
            continue
        ours.optimizer.zero_grad()
        ours.net(batch(0)[rank::2]).square().mean().backward()
        count = torch_clip(ours.model.parameters(), 10.0, 0, foreach=True)
        assert ours.optimizer.clip_grad_norm_(10.0, norm_type=0, foreach=True) == count == 5


@on_shm_ranks(2)
def test_torchs_clipping_where_gradients_are_whole(rank: int) -> None:
    one, ours = pair(1)
    for step in range(3):
        for training in (one, ours):
            training.optimizer.zero_grad()
            training.backward(step)
            torch_clip(training.model.parameters(), 0.05)
            training.optimizer.step()
        assert_equal_parameters(ours.model, one.model)


def clip_as_torch_does(training: Training, rank: int) -> None:
    torch_clip(training.model.parameters(), 0.05)


def clip_by_value_on_rank_1(training: Training, rank: int) -> None:
    if rank == 1:
        nn.utils.clip_grad_value_([training.model[0].weight], 0.01)


def replace_on_rank_0(training: Training, rank: int) -> None:
    if rank == 0:
        training.model[0].weight.grad = torch.ones(13, 6)


def clip_with_both(training: Training, rank: int) -> None:
    torch_clip(training.model.parameters(), 0.05)
    training.optimizer.clip_grad_norm_(0.01)


@on_shm_and_gloo_ranks(2)
def test_what_shards_cannot_follow(rank: int) -> None:
    """All ranks raise and nothing is stepped; zero_grad() makes it good."""
    changes = [clip_as_torch_does, clip_by_value_on_rank_1, replace_on_rank_0, clip_with_both]
    one, ours = pair(2)
    for step, change in enumerate(changes):
        ours.optimizer.zero_grad()
        ours.backward(50)
        change(ours, rank)
        before = values(ours.model)
        parts = ("[zero] the gradient of ", "(rank ", "clip with trireme.clip_grad_norm_")
        with raises(RuntimeError, *parts):
            ours.optimizer.step()
        for name, value in values(ours.model).items():
            assert torch.equal(value, before[name])
        one.train(step)
        ours.train(step)
        assert_equal_parameters(ours.model, one.model)


# --- Scaling --------------------------------------------------------------------------------------


def train_scaled(
    training: Training, scaler: GradScaler, step: int, unscale: bool, factor: float = 1.0
) -> None:
    training.optimizer.zero_grad()
    scaler.scale(factor * training.loss(step)).backward()
    if unscale:
        scaler.unscale_(training.optimizer)
        clip = torch_clip if training.world == 1 else trireme.clip_grad_norm_
        clip(training.model.parameters(), 0.05)
    scaler.step(training.optimizer)
    scaler.update()


@on_shm_and_gloo_ranks(2)
def test_a_grad_scaler(rank: int) -> None:
    """One rank alone finds an inf, in what itself or the other owns: nobody steps, all scale down;
    later all scale up."""
    broken = {2: 0, 3: 1, 6: 1}
    for stage in (1, 2):
        one, ours = pair(stage)
        options = {"init_scale": 1024.0, "growth_interval": 2}
        scalers = GradScaler("cpu", **options), GradScaler("cpu", **options)
        for step in range(10):
            before = values(ours.model)
            breaks = math.inf if step in broken else 1.0
            unscale = step % 3 == 0
            train_scaled(one, scalers[0], step, unscale, breaks)
            breaks = math.inf if broken.get(step) == rank else 1.0
            train_scaled(ours, scalers[1], step, unscale, breaks)
            assert scalers[1].get_scale() == scalers[0].get_scale()
            skipped = torch.equal(before["0.weight"], ours.model[0].weight)
            assert skipped == (step in broken)
            assert_equal_parameters(ours.model, one.model)


@on_shm_ranks(2)
def test_an_inf_in_one_shard(rank: int) -> None:
    """Only its owner sees it, since the other's shard of the average is finite."""
    one, ours = pair(2)
    scalers = GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=8.0)
    for step, (row, unscale) in enumerate([(0, True), (12, True), (0, False), (12, False)]):
        before = values(ours.model)
        for training, scaler in zip((one, ours), scalers, strict=True):
            training.optimizer.zero_grad()
            huge = math.inf * training.model[0].weight[row].sum()
            scaler.scale(training.loss(step) + huge).backward()
            if unscale:
                scaler.unscale_(training.optimizer)
            scaler.step(training.optimizer)
            scaler.update()
        assert scalers[1].get_scale() == scalers[0].get_scale() == 8.0 / 2 ** (step + 1)
        for name, value in values(ours.model).items():
            assert torch.equal(value, before[name])


@on_shm_ranks(2)
def test_torchs_clipping_of_unscaled_gradients(rank: int) -> None:
    """Right under stage 1; an error on all ranks under stage 2, after which the run goes on."""
    for stage in (1, 2):
        one, ours = pair(stage)
        scalers = GradScaler("cpu", init_scale=64.0), GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            for training, scaler in zip((one, ours), scalers, strict=True):
                training.optimizer.zero_grad()
                scaler.scale(training.loss(step)).backward()
                scaler.unscale_(training.optimizer)
                torch_clip(training.model.parameters(), 0.05)
                if training is one or stage == 1:
                    scaler.step(training.optimizer)
                else:
                    with raises(RuntimeError, "clip with trireme.clip_grad_norm_"):
                        scaler.step(training.optimizer)
                scaler.update()
            if stage == 1:
                assert_equal_parameters(ours.model, one.model)
        train_scaled(ours, scalers[1], 5, unscale=True)


@on_shm_ranks(2)
def test_a_scaler_that_is_off(rank: int) -> None:
    one, ours = pair(2)
    scaler = GradScaler("cpu", enabled=False)
    for step in range(2):
        for training in (one, ours):
            train_scaled(training, scaler, step, unscale=True)
        assert_equal_parameters(ours.model, one.model)


@on_shm_ranks(2)
def test_one_scaler_for_two_optimizers(rank: int) -> None:
    """Each decides for itself: only the one whose gradients hold an inf skips."""
    ours = mlp()
    first = Zero(ours[0].parameters(), SGD, stage=2, lr=0.1)
    second = Zero([*ours[2].parameters(), *ours[4].parameters()], SGD, stage=2, lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        before = values(ours)
        ours.zero_grad()
        huge = (math.inf if step == 1 and rank == 0 else 0.0) * ours[0].bias[0]
        scaler.scale(ours(batch(step)[rank::2]).square().mean() + huge).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        assert torch.equal(before["0.weight"], ours[0].weight) == (step == 1)
        assert not torch.equal(before["4.weight"], ours[4].weight)
        assert_same_on_all_ranks(list(ours.parameters()))
    assert scaler.get_scale() == 2.0


@STAGES
@on_shm_ranks(2)
def test_a_scaler_and_a_group_that_came_later(rank: int, stage: int) -> None:
    """Two parts of one optimizer take one decision."""
    model = mlp()
    net = DDP(model) if stage == 1 else model
    optimizer = Zero(model[0].parameters(), SGD, stage=stage, lr=0.1)
    optimizer.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()]})
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        before = values(model)
        optimizer.zero_grad()
        huge = (math.inf if step == 1 and rank == 1 else 0.0) * model[4].bias[0]
        loss = net(batch(step)[rank::2]).square().mean()
        scaler.scale(loss + huge).backward()
        scaler.step(optimizer)
        scaler.update()
        for name, value in values(model).items():
            assert torch.equal(before[name], value) == (step == 1)
        assert_same_on_all_ranks(list(model.parameters()))
    assert scaler.get_scale() == 2.0
