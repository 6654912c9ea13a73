"""Parameters frozen, unfrozen or unused, now and then or by some ranks: as in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import SGD, AdamW

from contract.strategies import Strategy, on_every_strategy, set_requires_grad
from harness.models import mlp
from harness.training import backward_by_rank


@on_every_strategy()
def test_parameters_frozen_from_the_start(rank: int, strategy: Strategy) -> None:
    """Then unfrozen. One of a layer, all of a layer, all of the first one or of all but the head,
    whose input then needs no gradient."""
    front = ["0.weight", "0.bias"]
    for frozen in (["0.weight", "4.bias"], ["2.weight"], front, [*front, "2.weight"]):

        def make(frozen: list[str] = frozen) -> nn.Module:
            model = mlp()
            set_requires_grad(model, dict.fromkeys(frozen, False))
            return model

        ours, one = strategy.pair(make)
        for step in range(3):
            strategy.train_both(ours, one, step)
        for name, parameter in ours.model.named_parameters():
            assert (parameter.grad is None) == (name in frozen)
        for training in (ours, one):
            set_requires_grad(training.model, dict.fromkeys(frozen, True))
        for step in range(3):
            strategy.train_both(ours, one, step)


@on_every_strategy(3)
def test_parameters_frozen_and_unfrozen_while_training_runs(rank: int, strategy: Strategy) -> None:
    changes = [
        {"0.weight": False, "4.bias": False},
        {"0.bias": False},
        {"0.weight": True},
        {"0.bias": True, "4.bias": True, "2.weight": False},
    ]
    for optimizer_class in (SGD, AdamW):
        trainings = strategy.pair(mlp, optimizer_class, lr=0.1)
        for change in changes:
            for step in range(3):
                for training in trainings:
                    if step == 0:
                        set_requires_grad(training.model, change)
                strategy.train_both(*trainings, step)
                for name, parameter in trainings[0].model.named_parameters():
                    assert parameter.requires_grad or parameter.grad is None, name


@on_every_strategy()
def test_another_half_is_frozen_in_every_step(rank: int, strategy: Strategy) -> None:
    """The way of a GAN; the optimizer is given all of them."""
    ours, one = strategy.pair(mlp)
    names = [name for name, _ in one.model.named_parameters()]
    for step in range(6):
        change = {name: (number + step) % 2 == 0 for number, name in enumerate(names)}
        for training in (ours, one):
            set_requires_grad(training.model, change)
        strategy.train_both(ours, one, step)


@on_every_strategy()
def test_a_frozen_parameter_keeps_the_gradient_that_it_has(rank: int, strategy: Strategy) -> None:
    """The optimizer goes on with it, until it is dropped."""
    trainings = strategy.pair(mlp)
    strategy.train_both(*trainings, 0)
    for training in trainings:
        set_requires_grad(training.model, {"0.weight": False, "4.bias": False})
    for step in range(1, 4):
        for training in trainings:
            training.backward(step)
        strategy.step_both(*trainings)
    strategy.train_both(*trainings, 4)


class Branches(nn.Module):
    """Each call uses the branches it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(6, 6)
        self.a, self.b, self.c = (nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, branches: str) -> torch.Tensor:
        hidden = self.trunk(x).tanh()
        return sum((getattr(self, branch)(hidden) for branch in branches), start=hidden[:, :4])


# What each of three ranks uses; the steps that come by turns.
PLANS: list[list[Sequence[str]]] = [
    [("a", "a", "a")],
    [("a", "b", "c"), ("", "", "")],
    [("ab", "", "a"), ("a", "b", "b"), ("c", "ca", "c")],
    [("a", "a", "a"), ("b", "b", "b"), ("c", "c", "c")],
]


@on_every_strategy(3, needs=("own_forward",), timeout=100)
def test_parameters_that_some_or_all_ranks_leave_unused(rank: int, strategy: Strategy) -> None:
    """Momentum does not move what nobody uses; gradients are dropped, or zeroed in place."""
    for plan in PLANS:
        ours, one = strategy.pair(Branches)
        for step in range(3 * len(plan)):
            for training in (ours, one):
                training.optimizer.zero_grad(set_to_none=step % 3 < 2)
            backward_by_rank(ours, one, step, plan[step % len(plan)][: ours.world])
            strategy.step_both(ours, one)
