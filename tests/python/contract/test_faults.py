"""A rank fails, is killed or does not come: the others raise, in words, and none hangs."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from contract.strategies import Strategy, on_every_strategy
from ddp.ranks import (
    AGES_S,
    HOUSE_FORM,
    break_it,
    kill_this_rank,
    message_of,
    mlp,
    raises,
    say,
    set_timeout,
    stay_until,
)


@on_every_strategy(3, timeout=40)
def test_a_backward_that_raises_on_one_rank(rank: int, strategy: Strategy) -> None:
    """Its own error comes out of its backward; those of all others name that rank.

    Where ranks share memory the next step works, and where there are no ranks.
    """
    ours, one = strategy.pair(mlp)
    for step in range(2):
        strategy.train_both(ours, one, step)
    for failing in range(ours.world) if strategy.recovers else [1]:
        ours.optimizer.zero_grad()
        if rank == failing:
            handle = ours.model[2].register_full_backward_hook(break_it)
        loss = ours.loss(50)
        if rank == failing:
            with pytest.raises(ArithmeticError, match="the data of this rank are broken"):
                loss.backward()
            handle.remove()
        else:
            cause = "ArithmeticError: the data of this rank are broken"
            said = ("backward", "was abandoned", cause, f"(rank {failing} of 3)")
            with raises(dist.DistBackendError, *said):
                loss.backward()
        if strategy.recovers:
            for step in range(2, 4):
                strategy.train_both(ours, one, step)


@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
@on_every_strategy(ranks_only=True, dying=(1,), timeout=40, patience_s=AGES_S)
def test_a_killed_rank(rank: int, strategy: Strategy, moment: str) -> None:
    """Long before the timeout of the group."""
    ours, _ = strategy.pair(mlp)
    ours.train(0)
    ours.train(1)
    if rank == 1 and moment == "forward":
        kill_this_rank()
    if rank == 1 and moment == "backward":
        ours.model[2].register_full_backward_hook(kill_this_rank)
    try:
        for step in range(2, 5):
            ours.optimizer.zero_grad()
            ours.backward(step)
            if rank == 1 and moment == "step":
                kill_this_rank()
            ours.optimizer.step()
    except dist.DistBackendError as error:
        text = message_of(error)
        assert HOUSE_FORM.match(text), text
        assert "rank 1" in text or "(rank 0 of 2)" in text, text
    else:
        raise AssertionError("nobody noticed")


@on_every_strategy(ranks_only=True, timeout=40, patience_s=AGES_S)
def test_a_rank_with_fewer_batches(rank: int, strategy: Strategy) -> None:
    """It ended well, and nobody calls it dead."""
    ours, _ = strategy.pair(mlp)
    for step in range(3):
        ours.train(step)
    if rank == 0:
        with raises(dist.DistBackendError, "rank 1 (process ", " after step 3", "See join()."):
            ours.train(3)


@on_every_strategy(ranks_only=True, timeout=40, patience_s=AGES_S)
def test_a_rank_that_does_not_come(rank: int, strategy: Strategy) -> None:
    """It lives, and the group's timeout ends the wait."""
    dist.barrier()
    set_timeout(4)  # groups that are made from now on take it over
    ours, _ = strategy.pair(mlp)
    ours.train(0)
    ours.train(1)
    if rank == 1:
        return stay_until("done")
    with raises(dist.DistBackendError, "(rank 0 of 2)"):
        ours.train(2)
    say("done")
