"""Steps, accumulation, freezing, clipping and saving: as one process on the whole batch."""

from __future__ import annotations

from pathlib import Path

import torch
import trireme
from torch import nn
from torch.optim import SGD, AdamW

from contract.strategies import Strategy, kept, on_every_strategy, set_requires_grad
from ddp.ranks import Tied, mlp
from zero.ranks import Shapes, accumulate_both


@on_every_strategy(3)
def test_equals_one_process(rank: int, strategy: Strategy) -> None:
    """Also with tied parameters, with four dtypes, and with fewer rows than ranks."""
    for make in (mlp, Tied, Shapes):
        for optimizer_class in (SGD, AdamW):
            ours, one = strategy.pair(make, optimizer_class, lr=0.01)
            for step in range(3):
                strategy.train_both(ours, one, step)
                for parameter in ours.model.parameters():
                    assert parameter.grad.stride() == parameter.stride()


@on_every_strategy()
def test_tied_parameters_stay_tied(rank: int, strategy: Strategy) -> None:
    ours, one = strategy.pair(Tied)
    for step in range(3):
        strategy.train_both(ours, one, step)
        assert ours.model.head.weight is ours.model.embed.weight
        with torch.no_grad():
            ours.loss(0)
        assert ours.model.head.weight is ours.model.embed.weight


@on_every_strategy()
def test_zeroed_gradients_keep_their_identity(rank: int, strategy: Strategy) -> None:
    """zero_grad(set_to_none=False), of the module and of the optimizer."""
    for by_module in (True, False):
        ours, one = strategy.pair(mlp)
        before: list[torch.Tensor | None] = []
        for step in range(4):
            for training in (ours, one):
                zeroing = training.model if by_module else training.optimizer
                zeroing.zero_grad(set_to_none=False)
                training.backward(step)
            strategy.step_both(ours, one)
            now = [parameter.grad for parameter in ours.model.parameters()]
            assert kept(now, before or now)
            before = now


@on_every_strategy(3)
def test_accumulation(rank: int, strategy: Strategy) -> None:
    for make in (mlp, Shapes):
        accumulate_both(*strategy.pair(make), strategy.step_both)


@on_every_strategy()
def test_several_forwards_before_backwards(rank: int, strategy: Strategy) -> None:
    """One backward of all of them, or one of each, in any order."""
    ours, one = strategy.pair(mlp)
    for order in (None, [0, 1, 2], [2, 1, 0], None, [1, 0, 2]):
        for training in (ours, one):
            training.optimizer.zero_grad()
            losses = [(1 + number) * training.loss(number) for number in range(3)]
            for number in order or ():
                losses[number].backward()
            if order is None:
                torch.stack(losses).sum().backward()
        strategy.step_both(ours, one)


@on_every_strategy()
def test_several_backwards_of_one_forward(rank: int, strategy: Strategy) -> None:
    ours, one = strategy.pair(mlp)
    for step in range(2):
        for training in (ours, one):
            training.optimizer.zero_grad()
            loss = training.loss(step)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        strategy.step_both(ours, one)


@on_every_strategy()
def test_forwards_without_backwards(rank: int, strategy: Strategy) -> None:
    """With and without a graph, before and between the forwards that are used."""
    ours, one = strategy.pair(mlp)
    for step in range(3):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.loss(50)
            loss = training.loss(step)
            with torch.no_grad():
                training.loss(51)
            loss.backward()
        strategy.step_both(ours, one)


@on_every_strategy()
def test_parameters_frozen_from_the_start(rank: int, strategy: Strategy) -> None:
    """One of a layer, all of a layer, all of the first layer: its output needs no gradient."""
    for frozen in (["0.weight", "4.bias"], ["2.weight"], ["0.weight", "0.bias"]):

        def make(frozen: list[str] = frozen) -> nn.Module:
            model = mlp()
            set_requires_grad(model, dict.fromkeys(frozen, False))
            return model

        ours, one = strategy.pair(make)
        for step in range(3):
            strategy.train_both(ours, one, step)
        parameters = dict(ours.model.named_parameters())
        assert all(parameters[name].grad is None for name in frozen)


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
def test_clipping(rank: int, strategy: Strategy) -> None:
    """trireme.clip_grad_norm_ knows the norm over all ranks' parts."""
    ours, one = strategy.pair(mlp)
    for step in range(3):
        norms = []
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
            norms.append(trireme.clip_grad_norm_(list(training.model.parameters()), 0.05))
        assert norms[1] > 0.05
        torch.testing.assert_close(norms[0], norms[1])
        strategy.step_both(ours, one)


@on_every_strategy()
def test_saved_in_the_middle(rank: int, strategy: Strategy, tmp_path: Path) -> None:
    """What was saved after two steps goes on, in a model of other values, as if never ended."""

    def other() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        return model

    folder = tmp_path / "saved"
    ours, one = strategy.pair(mlp, AdamW, lr=0.01)
    for step in range(2):
        strategy.train_both(ours, one, step)
    trireme.save_checkpoint(folder, ours.model, ours.optimizer, extra={"step": 2})
    again, _ = strategy.pair(other, AdamW, lr=0.01)
    assert trireme.load_checkpoint(folder, again.model, again.optimizer) == {"step": 2}
    for step in range(2, 4):
        strategy.train_both(again, one, step)
