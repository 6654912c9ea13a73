"""A rank fails, is killed or does not come under fully_shard: the others raise, naming it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ddp.ranks import (
    AGES_S,
    batch,
    break_it,
    kill_this_rank,
    mlp,
    raises,
    say,
    set_timeout,
    stay_until,
)
from fsdp.ranks import local, pair, sharded, train_both
from shm.ranks import on_shm_and_gloo_ranks, on_shm_ranks

MOMENTS = ("unshard", "collect", "step gate")


@pytest.mark.parametrize("moment", MOMENTS)
@on_shm_ranks(3, dying=(1,), timeout=40, patience_s=AGES_S)
def test_a_rank_is_killed(rank: int, moment: str) -> None:
    """Before it publishes its writes, in backward, before it lets others write."""
    ours = sharded(mlp)
    ours.train(0)
    ours.train(1)
    with raises(dist.DistBackendError, "rank 1", "has died", f"(rank {rank} of 3)"):
        if moment == "unshard":
            if rank == 1:
                kill_this_rank()
            ours.model.unshard()
        elif moment == "collect":
            loss = ours.loss(2)
            if rank == 1:
                ours.model[0].register_full_backward_hook(kill_this_rank)
                ours.loss(2).backward()
            loss.backward()
        else:
            ours.optimizer.zero_grad()
            ours.backward(2)
            if rank == 1:
                kill_this_rank()
            ours.optimizer.step()


@on_shm_ranks(2, timeout=40)
def test_an_exception_in_forward_on_one_rank(rank: int) -> None:
    """It is that rank's business as long as it comes to the next backward."""
    ours, one = pair(mlp)
    train_both(ours, one, 0)
    for _ in range(2):
        if rank == 1:
            handle = ours.model[2].register_forward_pre_hook(break_it)
            with pytest.raises(ArithmeticError):
                ours.model(batch(1))
            handle.remove()
            ours.model.reset_iter_state()
        train_both(ours, one, 2)


@pytest.mark.parametrize("where", ["before writing", "written"])
@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_a_rank_that_does_not_come(rank: int, where: str) -> None:
    """To the step, or to the forward after it: it is said what is waited for, and that the rank is
    alive."""
    ours = sharded(mlp)
    ours.train(0)
    if where == "before writing":
        ours.backward(1)
    if rank == 1:
        return stay_until("done")
    set_timeout(2)
    with raises(dist.DistBackendError, f"step gate: {where}", "rank 1", "alive"):
        ours.optimizer.step() if where == "before writing" else ours.loss(1)
    say("done")


@on_shm_and_gloo_ranks(3, timeout=40)
def test_units_of_different_parameters(rank: int) -> None:
    """All ranks raise, and name one."""
    width = 5 + rank
    with raises(ValueError, "[fully_shard]", "weight"):
        sharded(lambda: torch.nn.Sequential(torch.nn.Linear(6, width)))


@on_shm_ranks(2, timeout=40)
def test_a_step_that_raises_on_one_rank(rank: int) -> None:
    """That rank's shards are as they were; no rank hangs."""
    ours = sharded(mlp)
    ours.train(0)
    ours.backward(1)
    step = ours.optimizer.step
    if rank == 1:
        before = [local(param) for param in ours.model.parameters()]
        ours.optimizer.param_groups[0]["lr"] = "none"
        with pytest.raises(TypeError):
            step()
        ours.optimizer.param_groups[0]["lr"] = 0.1
        for param, kept in zip(ours.model.parameters(), before, strict=True):
            torch.testing.assert_close(local(param), kept)
    else:
        step()
    ours.train(2)
