"""The step gate of ZeroRedundancyOptimizer: who reads the parameters while who writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.optim import SGD, AdamW

from harness.meeting import until_inside
from harness.models import batch, mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import alone, assert_equal_parameters, values
from zero.ranks import DDP, STAGES, Zero, sharded


@STAGES
@on_shm_ranks(3)
def test_who_reads_sees_one_step(rank: int, stage: int) -> None:
    """Rank 0 evaluates while the others wait in step(); rank 2 after it while they go on."""
    one, ours = alone(mlp, SGD, lr=0.1), sharded(mlp, SGD, stage, lr=0.1)
    for step in range(3):
        one.train(step)
        ours.optimizer.zero_grad()
        ours.backward(step)
        before = values(ours.model)
        if rank == 0:
            until_inside((1, 2), "step gate: before writing")
            with torch.no_grad():
                ours.model(batch(50))
            assert_unchanged(ours.model, before)
        ours.optimizer.step()
        after = values(ours.model)
        assert not torch.equal(before["0.weight"], after["0.weight"])
        if rank == 2 and step < 2:
            until_inside((0, 1))  # at the latest in the next backward
            assert_unchanged(ours.model, after)
        assert_equal_parameters(ours.model, one.model)


def assert_unchanged(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in values(model).items():
        assert torch.equal(value, expected[name]), name


def parts_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [*model[0].parameters()], [*model[2].parameters(), *model[4].parameters()]


@on_shm_ranks(2)
def test_two_optimizers(rank: int) -> None:
    """Stages are 2 and 2, then 1 and 2 with DDP around a part; they step in turn, too."""
    one = mlp()
    both = [SGD(parts_of(one)[0], lr=0.1), AdamW(parts_of(one)[1], lr=0.01)]
    of_2_and_2, of_1_and_2 = mlp(), mlp()
    wrapped = nn.Sequential(DDP(of_1_and_2[0]), *of_1_and_2[1:])
    trainings: list[tuple[nn.Module, nn.Module, list[Any]]] = [(one, one, both)]
    for model, net, stage in ((of_2_and_2, of_2_and_2, 2), (of_1_and_2, wrapped, 1)):
        first, rest = parts_of(model)
        optimizers = [
            Zero(first, SGD, stage=stage, lr=0.1),
            Zero(rest, AdamW, stage=2, lr=0.01),
        ]
        trainings.append((model, net, optimizers))
    for step in range(4):
        for model, net, optimizers in trainings:
            for optimizer in optimizers:
                optimizer.zero_grad()
            rows = batch(step, rows=12)
            net(rows if model is one else rows[rank::2]).square().mean().backward()
            optimizers[step % 2].step()
            if step > 1:
                optimizers[1 - step % 2].step()
        for model, _, _ in trainings[1:]:
            assert_equal_parameters(model, one)


@STAGES
@on_shm_ranks(2)
def test_schedulers_and_groups_that_come_later(rank: int, stage: int) -> None:
    """OneCycleLR writes betas as well as learning rates into the groups."""
    one, ours = mlp(), mlp()
    trainings = []
    for model in (one, ours):
        first, rest = parts_of(model)
        if model is one:
            optimizer: Any = AdamW(first, lr=0.01)
        else:
            optimizer = Zero(first, AdamW, stage=stage, lr=0.01)
        net = DDP(model) if model is ours and stage == 1 else model
        trainings.append((model, net, optimizer, rest))
    schedulers: list[Any] = []
    for step in range(6):
        if step == 2:
            for _, _, optimizer, rest in trainings:
                optimizer.add_param_group({"params": rest, "lr": 0.02, "weight_decay": 0.3})
                options = {"max_lr": [0.05, 0.1], "total_steps": 8}
                schedulers.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, **options))
        for model, net, optimizer, _ in trainings:
            model.zero_grad()
            rows = batch(step, rows=12)
            net(rows if model is one else rows[rank::2]).square().mean().backward()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        assert_equal_parameters(ours, one)
    shown, plain = (optimizer.param_groups for _, _, optimizer, _ in reversed(trainings))
    for group, expected in zip(shown, plain, strict=True):
        for name in ("lr", "betas", "weight_decay", "initial_lr"):
            assert group[name] == expected[name], name


@on_shm_ranks(2)
def test_step_hooks_are_called_around_the_gate(rank: int) -> None:
    ours = sharded(mlp, SGD, 2, lr=0.1)
    seen: list[dict[str, torch.Tensor]] = []
    ours.optimizer.register_step_pre_hook(lambda *_: seen.append(values(ours.model)))
    ours.optimizer.register_step_post_hook(lambda *_: seen.append(values(ours.model)))
    before = values(ours.model)
    ours.train(0)
    assert len(seen) == 2
    for name, value in before.items():
        assert torch.equal(seen[0][name], value)
        assert torch.equal(seen[1][name], values(ours.model)[name])
    assert not torch.equal(seen[0]["0.weight"], seen[1]["0.weight"])


@on_shm_and_gloo_ranks(1)
def test_one_rank_alone(rank: int) -> None:
    """What it writes and how it fails concerns nobody else."""
    for stage in (1, 2):
        one, ours = alone(mlp, AdamW, lr=0.01), sharded(mlp, AdamW, stage, lr=0.01)
        for step in range(3):
            for training in (one, ours):
                training.train(step)
                with torch.no_grad():
                    training.model[0].weight.mul_(0.9)
            with trireme.writing(ours.optimizer):
                pass
            with pytest.raises(ZeroDivisionError):
                ours.optimizer.step(lambda: 1 / 0)
        assert_equal_parameters(ours.model, one.model)
