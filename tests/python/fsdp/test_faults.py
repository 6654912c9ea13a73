"""A rank fails under fully_shard, or has another model: who is concerned raises."""

from __future__ import annotations

import pytest
import torch

from fsdp.ranks import local, pair, sharded, train_both
from harness.faults import break_it, raises
from harness.models import batch, mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks


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
