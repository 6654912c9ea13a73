"""A rank fails, is killed or does not come: the others raise, in words, and none hangs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from contract.strategies import (
    STRATEGIES,
    Strategy,
    middle_layer,
    on_every_strategy,
    strategies_with,
)
from fsdp.ranks import own
from harness.deaths import SEEN_S, Death, assert_seen_soon, die, die_when_awaited, run_deaths
from harness.faults import HOUSE_FORM, Breaks, break_it, message_of, raises
from harness.meeting import meet_again, say, set_timeout, stay_until
from harness.models import mlp
from harness.on_ranks import AGES_S


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


class Held:
    """What a hook in a graph holds."""


@on_every_strategy(needs=("ranks", "passes", "recovers"))
def test_an_abandoned_backward_keeps_no_graph(rank: int, strategy: Strategy) -> None:
    """Autograd drops what it has queued and not run, though no other backward follows."""
    ours = strategy.pair(mlp)[0]
    ours.train(0)
    queued, held = torch.ones(3, requires_grad=True) * 2, Held()
    queued.register_hook(lambda gradient, held=held: None)
    alive = weakref.ref(held)
    if rank == 0:
        handle = middle_layer(ours.model).register_full_backward_hook(break_it)
    loss = queued.sum() + ours.loss(1)
    del held, queued
    with strategy.abandons(ours, 0):
        loss.backward()
    if rank == 0:
        handle.remove()
    del loss
    gc.collect()
    assert alive() is None


@on_every_strategy(needs=("passes", "runs_alone"))
def test_a_forward_that_raises(rank: int, strategy: Strategy) -> None:
    """On all ranks: nothing was promised to anybody, and they go on with the next batch."""
    ours, one = strategy.pair(mlp)
    for step in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ours.net(torch.ones(2, 7))
        strategy.train_both(ours, one, step)


@on_every_strategy(needs=("passes", "runs_alone"))
def test_an_exception_outside_of_the_model_concerns_nobody(rank: int, strategy: Strategy) -> None:
    """It comes before the gradient reaches an output: no averaging has begun."""
    ours, one = strategy.pair(mlp)
    for step in range(3):
        if rank == ours.world - 1:
            with pytest.raises(ArithmeticError):
                Breaks.apply(ours.loss(50), True).backward()
        strategy.train_both(ours, one, step)


MOMENTS = (
    "before forward",
    "in forward",
    "before backward",
    "in backward",
    "before step",
    "in step",
)


class Mortal(SGD):
    """Its step may be the last thing that a rank does."""

    end: Any = None

    def step(self, closure: Any = None) -> Any:
        if self.end is not None:
            self.end()
        return super().step(closure)


def outlive(rank: int, strategy: Strategy, moment: str) -> None:
    ours, _ = strategy.pair(mlp, Mortal, lr=0.1)
    ours.train(0)
    ours.train(1)

    end = die_when_awaited if strategy.recovers else die

    def may_die(now: str) -> None:
        if rank == 1 and now == moment:
            end()

    if rank == 1 and moment == "in forward":
        middle_layer(ours.model).register_forward_pre_hook(end)
    if rank == 1 and moment == "in backward":
        middle_layer(ours.model).register_full_backward_hook(end)
    if rank == 1 and moment == "in step":
        getattr(ours.optimizer, "optim", ours.optimizer).end = end
    text = ""
    try:
        for step in range(2, 5):
            ours.optimizer.zero_grad()
            may_die("before forward")
            if strategy.passes:
                loss = ours.loss(step)
                may_die("before backward")
                loss.backward()
            else:
                ours.backward(step)
            may_die("before step")
            ours.optimizer.step()
    except dist.DistBackendError as error:
        text = message_of(error)
    assert_seen_soon(SEEN_S if strategy.recovers else 10)  # Gloo tells one neighbour, that the next
    parts = (
        f"(rank {rank} of 3)",
        *strategy.dead.get("always", ()),
        *strategy.dead.get(moment, ()),
    )
    assert HOUSE_FORM.match(text), text
    assert not [part for part in parts if part not in text], text
    assert all(own(parameter).isfinite().all() for parameter in ours.model.parameters())
    if not strategy.passes:
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            ours.backward(9)


@pytest.mark.parametrize("strategy", strategies_with("ranks"))
def test_a_killed_rank(strategy: str) -> None:
    """Others raise at once, long before the timeout of the group; what they have can be saved."""
    chosen = STRATEGIES[strategy]
    moments = [moment for moment in MOMENTS if chosen.passes or moment != "before backward"]
    deaths = [Death(1, (chosen, moment)) for moment in moments]
    run_deaths(outlive, 3, deaths, chosen.backend, timeout=60)


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


@on_every_strategy(needs=("ranks",), timeout=60, patience_s=AGES_S)
def test_a_rank_that_does_not_come(rank: int, strategy: Strategy) -> None:
    """It lives, and the group's timeout ends the wait: in the first step of all, or in another."""
    dist.barrier()  # Gloo's ranks must have met before one of them leaves
    for place, parts in strategy.late.items():
        meet_again(place, AGES_S)
        dist.barrier()
        set_timeout(2.5)  # groups that are made from now on take it over
        ours, _ = strategy.pair(mlp)
        if place != "first forward":
            ours.train(0)
            ours.train(1)
            if place == "step":
                ours.backward(2)
            dist.barrier()
            set_timeout(0.5)  # rank 1 alone does not come, however busy the machine is
        if rank == 1:
            stay_until("done")
            continue
        with raises(dist.DistBackendError, "(rank 0 of 2)", *parts):
            ours.optimizer.step() if place == "step" else ours.train(2)
        say("done")
