"""A rank fails, is killed or does not come: the others raise, in words, and none hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from contract.strategies import Strategy, middle_layer, on_every_strategy
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

    Where ranks share memory the next step works, and where there are no ranks; also if it was the
    first backward of all.
    """
    for steps_before in (0, 2) if strategy.recovers else (2,):
        ours, one = strategy.pair(mlp)
        for step in range(steps_before):
            strategy.train_both(ours, one, step)
        for failing in range(ours.world) if strategy.recovers else [1]:
            ours.optimizer.zero_grad()
            if rank == failing:
                handle = middle_layer(ours.model).register_full_backward_hook(break_it)
            with strategy.abandons(ours, failing):
                ours.backward(50)
            if rank == failing:
                handle.remove()
            for step in range(10, 13) if strategy.recovers else ():
                strategy.train_both(ours, one, step)


@on_every_strategy(needs=("passes", "runs_alone"))
def test_a_forward_that_raises(rank: int, strategy: Strategy) -> None:
    """On all ranks: nothing was promised to anybody, and they go on with the next batch."""
    ours, one = strategy.pair(mlp)
    for step in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ours.net(torch.ones(2, 7))
        strategy.train_both(ours, one, step)


class _Breaks(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        break_it()


@on_every_strategy(needs=("passes", "runs_alone"))
def test_an_exception_outside_of_the_model_concerns_nobody(rank: int, strategy: Strategy) -> None:
    """It comes before the gradient reaches an output: no averaging has begun."""
    ours, one = strategy.pair(mlp)
    for step in range(3):
        if rank == ours.world - 1:
            with pytest.raises(ArithmeticError):
                _Breaks.apply(ours.loss(50)).backward()
        strategy.train_both(ours, one, step)


@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
@on_every_strategy(needs=("ranks",), dying=(1,), timeout=40, patience_s=AGES_S)
def test_a_killed_rank(rank: int, strategy: Strategy, moment: str) -> None:
    """Long before the timeout of the group."""
    ours, _ = strategy.pair(mlp)
    ours.train(0)
    ours.train(1)
    if rank == 1 and moment == "forward":
        kill_this_rank()
    if rank == 1 and moment == "backward":
        middle_layer(ours.model).register_full_backward_hook(kill_this_rank)
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


@on_every_strategy(needs=("ranks",), timeout=40, patience_s=AGES_S)
def test_a_rank_with_fewer_batches(rank: int, strategy: Strategy) -> None:
    """It ended well, and nobody calls it dead."""
    ours, _ = strategy.pair(mlp)
    for step in range(3):
        ours.train(step)
    if rank == 0:
        with raises(
            dist.DistBackendError, "rank 1 (process ", " after step 3", "See join() of DDP"
        ):
            ours.train(3)


@on_every_strategy(needs=("ranks",), timeout=40, patience_s=AGES_S)
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
