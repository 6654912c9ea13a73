"""Strategies where ranks are on several hosts, which are pretended and share no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from contract.strategies import STRATEGIES, Strategy, middle_layer
from harness.deaths import Death, run_deaths
from harness.faults import break_it, kill_this_rank, raises
from harness.meeting import say, stay_until
from harness.models import Shapes, Tied, mlp
from harness.pretended_hosts import LAYOUTS, on_hosts

NAMES = [
    name for name, one in STRATEGIES.items() if one.backend == "trireme" and one.passes
]  # a pipeline needs more layers than there are
over_hosts = pytest.mark.parametrize("strategy", NAMES)


def train(rank: int, world: int, strategy: Strategy) -> None:
    for make in (mlp, Tied, Shapes):
        ours, one = strategy.pair(make)
        for step in range(3):
            strategy.train_both(ours, one, step)


@pytest.mark.parametrize("layout", ["2x2", "1+3"])
@over_hosts
def test_equals_one_process(strategy: str, layout: str) -> None:
    on_hosts(layout, train, STRATEGIES[strategy])


def abandon(rank: int, world: int, strategy: Strategy) -> None:
    ours, one = strategy.pair(mlp)
    strategy.train_both(ours, one, 0)
    if rank == 1:
        middle_layer(ours.model).register_full_backward_hook(break_it)
    with strategy.abandons(ours, 1):
        ours.backward(1)


@over_hosts
def test_a_backward_that_raises_on_one_rank(strategy: str) -> None:
    """On all hosts at once."""
    on_hosts("2x2", abandon, STRATEGIES[strategy])


def outlive(rank: int, strategy: Strategy, layout: str, moment: str) -> None:
    """Ranks of its host see it die; the others are told by them."""
    ours, _ = strategy.pair(mlp)
    ours.train(0)
    ours.train(1)

    def die_when_others_come(*_: Any) -> None:
        stay_until("0 comes", "2 comes", "3 comes")
        kill_this_rank()

    if rank == 1:
        if moment == "before forward":
            die_when_others_come()
        middle_layer(ours.model).register_full_backward_hook(die_when_others_come)
    say(f"{rank} comes")
    saw_it = LAYOUTS[layout][rank] == LAYOUTS[layout][1]
    with raises(dist.DistBackendError, "rank 1", "has died" if saw_it else ""):
        for step in range(3):
            ours.train(step)


@over_hosts
def test_a_killed_rank(strategy: str) -> None:
    run_deaths(
        outlive,
        4,
        [
            Death(1, (STRATEGIES[strategy], layout, moment), LAYOUTS[layout])
            for layout, moment in (("2x2", "before forward"), ("1+3", "in backward"))
        ],
    )
