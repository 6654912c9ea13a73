"""A rank fails, or leaves: the others raise in time, and may go on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.optim import SGD

from harness.faults import Breaks, break_it, raises
from harness.models import batch, mlp
from harness.on_ranks import AGES_S, on_gloo_ranks, on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import Training, alone, assert_equal_parameters
from zero.ranks import DDP, STAGES, Zero, sharded


class Fragile(SGD):
    """Its step raises when told to, before or after it has written."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        self.breaks = ""

    def step(self, closure: Any = None) -> Any:
        if self.breaks == "before":
            raise ArithmeticError("no step for this rank")
        loss = super().step(closure)
        if self.breaks == "after":
            raise ArithmeticError("no step for this rank")
        return loss


def fails(failing: bool, *parts: str) -> Any:
    """The failing rank sees its own exception, the others one that names it."""
    if failing:
        return pytest.raises(ArithmeticError, match="no step for this rank")
    return raises(dist.DistBackendError, "ArithmeticError: no step for this rank", *parts)


def assert_goes_on(ours: Training, steps: int = 3) -> None:
    """From where it is now, as one process does."""
    dist.barrier()  # until all have left what failed, and write no more
    one = alone(mlp, SGD, lr=0.1)
    one.model.load_state_dict(ours.model.state_dict())
    for step in range(20, 20 + steps):
        one.train(step)
        ours.train(step)
        assert_equal_parameters(ours.model, one.model)


@STAGES
@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_the_inner_optimizer_raises_on_one_rank(rank: int, stage: int) -> None:
    """Others raise from the same step and name it; the next step works, and nothing is kept."""
    ours = sharded(mlp, Fragile, stage, lr=0.1)
    for number, when in enumerate(("before", "after", "before")):
        failing = number % 2
        ours.train(number)
        ours.optimizer.zero_grad()
        ours.backward(50)
        ours.optimizer.optim.breaks = when if rank == failing else ""
        with fails(rank == failing, "[zero] step ", "was abandoned", f"(rank {failing} of 2)"):
            ours.optimizer.step()
        ours.optimizer.optim.breaks = ""
        assert_goes_on(ours)


@on_shm_ranks(3, timeout=60)
def test_a_closure_raises_on_one_rank(rank: int) -> None:
    """The others wait in the backward of theirs, or already in the step; of one part or two."""
    for stage, grown in itertools.product((1, 2), (False, True)):
        ours = sharded(mlp, SGD, stage, lr=0.1)
        if grown:
            ours.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
        for failing, moment in ((0, "before backward"), (2, "after backward")):

            def closure(
                ours: Training = ours, breaks: bool = rank == failing, moment: str = moment
            ) -> None:
                ours.optimizer.zero_grad()
                if moment == "after backward":
                    ours.backward(0)
                if breaks:
                    raise ArithmeticError("no step for this rank")
                if moment == "before backward":
                    ours.backward(0)

            with fails(rank == failing, f"(rank {failing} of 3)"):
                ours.optimizer.step(closure)
            assert_goes_on(ours, steps=2)


def hook_of_parameter(parameter: torch.Tensor, break_it: Callable[..., Any]) -> Any:
    return parameter.register_hook(break_it)


def hook_after_accumulation(parameter: torch.Tensor, break_it: Callable[..., Any]) -> Any:
    return parameter.register_post_accumulate_grad_hook(break_it)


@on_shm_ranks(2, timeout=60, patience_s=AGES_S)
def test_a_hook_raises_on_one_rank(rank: int) -> None:
    """In the middle of a backward that averages; in the first one and in one that streams."""
    for register, before in itertools.product((hook_of_parameter, hook_after_accumulation), (0, 3)):
        ours = sharded(mlp, SGD, 2, lr=0.1)
        for step in range(before):
            ours.train(step)
        for failing in (0, 1):
            ours.optimizer.zero_grad()
            loss = ours.loss(50)
            if rank == failing:
                handle = register(ours.model[2].weight, break_it)
                with pytest.raises(ArithmeticError, match="the data of this rank"):
                    loss.backward()
                handle.remove()
            else:
                text = f"[zero] backward {before + 1 + 4 * failing} was abandoned"
                with raises(dist.DistBackendError, text, f"(rank {failing} of 2)"):
                    loss.backward()
            assert_goes_on(ours)


@on_shm_ranks(2, timeout=40)
def test_what_was_averaged_before_survives(rank: int) -> None:
    """An accumulation whose second backward breaks is as if that had never begun."""
    one, ours = alone(mlp, SGD, lr=0.1), sharded(mlp, SGD, 2, lr=0.1)
    for training in (one, ours):
        training.train(0)
        training.train(1)
        training.optimizer.zero_grad()
        training.backward(2)
    net = nn.Sequential(*ours.model[:3], ArithmeticBreak(rank == 1), *ours.model[3:])
    loss = net(batch(3)[rank::2]).sum()
    with pytest.raises(ArithmeticError if rank == 1 else dist.DistBackendError):
        loss.backward()
    one.optimizer.step()
    ours.optimizer.step()
    assert_equal_parameters(ours.model, one.model)
    assert_goes_on(ours)


@on_shm_ranks(2, timeout=40)
def test_a_fused_step_goes_on_like_a_plain_one(rank: int) -> None:
    """After backwards that broke on one rank: the same bits."""
    pair = [
        sharded(mlp, trireme.optim.AdamW, 2, {"fused_step": fused}, lr=0.01)
        for fused in (False, True)
    ]
    broken: tuple[type[Exception], ...] = (ArithmeticError, dist.DistBackendError)
    for step in range(10):
        for ours in pair:
            if step in (3, 6):
                hooked = [ours.model[2].weight] if rank == step % 2 else []
                handles = [parameter.register_hook(break_it) for parameter in hooked]
                with pytest.raises(broken):
                    ours.train(step)
                for handle in handles:
                    handle.remove()
            ours.train(step)
        for plain, fused in zip(*(ours.model.parameters() for ours in pair), strict=True):
            assert torch.equal(plain, fused), step


class ArithmeticBreak(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Breaks.apply(x, self.breaks)


@pytest.mark.parametrize("where", ["backward", "step"])
@on_gloo_ranks(2, timeout=40, patience_s=AGES_S)
def test_gloo_cannot_go_on(rank: int, where: str) -> None:
    """All raise, and then say what to do."""
    ours = sharded(mlp, Fragile, 2, lr=0.1)
    ours.train(0)
    ours.optimizer.zero_grad()
    if where == "backward" and rank == 1:
        ours.model[2].weight.register_hook(break_it)
    ours.optimizer.optim.breaks = "before" if rank == 1 else ""
    expected = pytest.raises(ArithmeticError) if rank == 1 else nullcontext()
    with expected:
        if rank == 1:
            ours.backward(1)
            ours.optimizer.step()
        else:
            with raises(dist.DistBackendError, "was abandoned", "(rank 1 of 2)"):
                ours.backward(1)
                ours.optimizer.step()
    again = "got a backward after the group had failed"
    with raises(dist.DistBackendError, "[zero] ", again, "make the optimizer anew"):
        ours.backward(2)
    with pytest.raises(dist.DistBackendError, match="was abandoned"):
        ours.optimizer.step()


class Picky(SGD):
    """Cannot be made by one rank."""

    def __init__(self, params: Any, picky: bool = True, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        if picky and dist.get_rank() == 1:
            raise FileNotFoundError("no table of learning rates")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "table" in param_group and dist.get_rank() == 0:
            raise FileNotFoundError("no table for this group")
        super().add_param_group(param_group)


@on_shm_and_gloo_ranks(2, timeout=40)
def test_an_optimizer_that_one_rank_cannot_make(rank: int) -> None:
    """All raise, their parameters are their own again; the same for a group that comes later."""
    for stage in (1, 2):
        model = mlp()
        if rank == 1:
            with pytest.raises(FileNotFoundError, match="no table of learning rates"):
                Zero(model.parameters(), Picky, stage=stage, lr=0.1)
        else:
            text = "got an optimizer that rank 1 cannot use: FileNotFoundError: no table of"
            with raises(ValueError, "[zero] ", text):
                Zero(model.parameters(), Picky, stage=stage, lr=0.1)
        if rank == 1:
            model[0].weight.data.zero_()
        dist.barrier()
        assert torch.all(model[0].weight == 0) == (rank == 1)
        net = DDP(model) if stage == 1 else model
        optimizer = Zero(model[0].parameters(), Picky, stage=stage, picky=False, lr=0.1)
        rest = [*model[2].parameters(), *model[4].parameters()]
        if rank == 0:
            with pytest.raises(FileNotFoundError, match="no table for this group"):
                optimizer.add_param_group({"params": rest, "table": 1})
        else:
            with raises(ValueError, "[zero] ", "that rank 0 cannot use", "for this group"):
                optimizer.add_param_group({"params": rest, "table": 1})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": rest})
        assert_goes_on(Training(model, net, optimizer, rank, 2))


# --- Gone and apart ------------------------------------------------------------------------------


@on_shm_ranks(2, timeout=40)
def test_a_rank_that_leaves(rank: int) -> None:
    ours = sharded(mlp, SGD, 2, lr=0.1)
    ours.train(0)
    if rank == 1:
        del ours
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    parts = ("rank 1", "ended normally after step 1")
    with raises(dist.DistBackendError, *parts), trireme.writing(ours.optimizer):
        pass
    with pytest.raises(dist.DistBackendError):
        ours.train(1)


@on_shm_ranks(2, fresh=True)  # optimizers are numbered by process
def test_two_optimizers_in_another_order_on_each_rank(rank: int) -> None:
    """Their parameters have the same names and shapes: only the optimizers can be told apart."""
    trainings = [sharded(mlp, SGD, 2, lr=0.1) for _ in range(2)]
    with raises(dist.DistBackendError, "'optimizer 1, bucket 0", "'optimizer 2, bucket 0"):
        trainings[rank].backward(0)
