"""Join: ranks with fewer inputs keep the others company, as under torch's DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from contract.strategies import Strategy, on_every_strategy
from fsdp.ranks import SGD_OPTIONS
from harness.faults import in_case
from harness.models import mlp
from harness.training import Training

Loop = Callable[[Training], None]


def by_torchs_ddp(loop: Loop, **join: Any) -> Training:
    """What a plain optimizer trains there."""
    model = mlp()
    ddp = TorchDDP(model)
    optimizer = SGD(model.parameters(), **SGD_OPTIONS)
    training = Training(model, ddp, optimizer, dist.get_rank(), dist.get_world_size())
    with ddp.join(**join):
        loop(training)
    return training


def joined(strategy: Strategy, loop: Loop, ours: Training, **join: Any) -> None:
    joinables, options = strategy.joins(ours)
    with Join(joinables, **options, **join):
        loop(ours)


def training(count: int, zero_first: bool = True) -> Loop:
    """So many steps."""

    def loop(training: Training) -> None:
        for number in range(count):
            if zero_first:
                training.optimizer.zero_grad()
            training.backward(number)
            training.optimizer.step()
            if not zero_first:
                training.optimizer.zero_grad()

    return loop


def compare(strategy: Strategy, *patterns: Sequence[int]) -> None:
    """By each pattern each rank has so many inputs; a step after the join is like any other."""
    for counts in patterns:
        for by_initial_world in (True, False):
            join = {"divide_by_initial_world_size": by_initial_world}
            right = by_torchs_ddp(training(counts[dist.get_rank()]), **join)
            for zero_first in (True, False):
                ours, _ = strategy.pair(mlp)
                with in_case(f"{counts}, {join}, {zero_first=}"):
                    joined(strategy, training(counts[ours.rank], zero_first), ours, **join)
                    strategy.assert_parameters(ours, right)
                    ours.train(9)


@on_every_strategy(needs=("joins",), timeout=100)
def test_two_ranks(rank: int, strategy: Strategy) -> None:
    compare(strategy, (3, 5), (6, 2), (0, 3), (4, 0), (3, 3), (0, 0))


@on_every_strategy(3, needs=("joins",), timeout=100)
def test_three_ranks_leave_one_after_another(rank: int, strategy: Strategy) -> None:
    compare(strategy, (5, 2, 3), (3, 1, 2))


@on_every_strategy(needs=("joins",))
def test_training_goes_on_after_a_join(rank: int, strategy: Strategy) -> None:
    """Afterwards the average is over all ranks again; also after another join."""
    ours, one = strategy.pair(mlp, SGD, lr=0.1)
    for counts in ((1, 3), (2, 1)):
        joined(strategy, training(counts[rank]), ours, divide_by_initial_world_size=False)
        load_values(one, ours)
        for step in range(2):
            strategy.train_both(ours, one, step)


def load_values(one: Training, ours: Training) -> None:
    for parameter, whole in zip(ours.counterparts(one), ours.model.parameters(), strict=True):
        value = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        parameter.data.copy_(value.detach())


@on_every_strategy(needs=("joins",))
def test_early_termination_raises_everywhere(rank: int, strategy: Strategy) -> None:
    """Nothing is broken: the next step is in step again."""
    ours, one = strategy.pair(mlp, SGD, lr=0.1)
    with pytest.raises(RuntimeError, match=r"exhausted .*inputs"):
        joined(strategy, training(2 + 2 * rank), ours, throw_on_early_termination=True)
    for joinable in strategy.joins(ours)[0]:
        joinable._join_config = joinable._join_config.construct_disabled_join_config()
    load_values(one, ours)
    strategy.train_both(ours, one, 4)


@on_every_strategy(needs=("joins",))
def test_disabled(rank: int, strategy: Strategy) -> None:
    ours, one = strategy.pair(mlp)
    joined(strategy, training(2), ours, enable=False)
    training(2)(one)
    strategy.assert_parameters(ours, one)


@on_every_strategy(needs=("joins",), timeout=100)
def test_a_schedule_and_clipping_are_followed(rank: int, strategy: Strategy) -> None:
    """What only ranks with inputs do to options and gradients holds for all."""

    def following(clip: Any, count: int) -> Loop:
        def loop(training: Training) -> None:
            schedule = ExponentialLR(training.optimizer, gamma=0.5)
            for number in range(count):
                training.optimizer.zero_grad()
                training.backward(number)
                if clip is not None:
                    clip(training.model.parameters(), 0.01)
                training.optimizer.step()
                schedule.step()

        return loop

    torchs = nn.utils.clip_grad_norm_
    clips = [None, trireme.clip_grad_norm_, *([torchs] if strategy.whole_gradients else [])]
    for clip in clips:
        for counts in ((2, 5), (3, 1)):
            right = by_torchs_ddp(following(clip and torchs, counts[rank]))
            ours, _ = strategy.pair(mlp)
            with in_case(f"{clip}, {counts}"):
                joined(strategy, following(clip, counts[rank]), ours)
                strategy.assert_parameters(ours, right)
