"""Steps, accumulation, clipping and saving: as one process on the whole batch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
import trireme
from torch import nn
from torch.optim import SGD, AdamW

from contract.strategies import Strategy, kept, on_every_strategy
from fsdp.ranks import local, own, own_part
from harness.models import Shapes, Tied, mlp
from harness.training import Training, accumulate_both


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
    """A rank with one of both layers has the values of both."""
    ours, one = strategy.pair(Tied)
    for step in range(3):
        strategy.train_both(ours, one, step)
        with torch.no_grad():
            ours.loss(0)
        whole = dict(ours.model.named_modules())
        if "head" in whole and "embed" in whole:
            assert whole["head"].weight is whole["embed"].weight
        else:
            assert not strategy.runs_alone


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


@on_every_strategy(needs=("passes",))
def test_sums_of_integers_are_exact(rank: int, strategy: Strategy) -> None:
    """What fp32 can hold is bitwise that of one process."""

    def make() -> nn.Module:
        layer = nn.Linear(4, 3, bias=False)
        nn.init.ones_(layer.weight)
        return nn.Sequential(layer, nn.Identity())

    ours, one = strategy.pair(make, SGD, lr=1.0)
    rows = torch.arange(24.0).reshape(6, 4)
    for _ in range(3):
        for training in (ours, one):
            training.optimizer.zero_grad()
            part = rows[training.rank :: training.world]
            (training.net(part).sum() * training.world).backward()
        strategy.step_both(ours, one)
    expected = 1 - 3 * rows.sum(0).expand(3, 4)
    weight = next(ours.model.parameters())
    assert torch.equal(own(weight), own_part(expected, weight))


@on_every_strategy()
def test_a_closure_is_called_once(rank: int, strategy: Strategy) -> None:
    """By its place or its name; it computes gradients all the same where none are recorded."""
    for optimizer_class in (SGD, AdamW):
        ours, one = strategy.pair(mlp, optimizer_class, lr=0.01)
        for step in range(4):
            for training in (ours, one):
                calls: list[torch.Tensor] = []

                def closure(
                    training: Training = training,
                    calls: list[torch.Tensor] = calls,
                    step: int = step,
                ) -> torch.Tensor:
                    training.optimizer.zero_grad()
                    training.backward(step)
                    calls.append(torch.tensor(1.5 + step))
                    return calls[0]

                with torch.no_grad() if step > 1 else nullcontext():
                    named = {"closure": closure} if step % 2 else {}
                    got = training.optimizer.step(*(() if named else (closure,)), **named)
                assert len(calls) == 1 and got is calls[0]
            strategy.assert_parameters(ours, one)


@on_every_strategy()
def test_a_step_without_gradients(rank: int, strategy: Strategy) -> None:
    """Before the first backward, and after zero_grad(), it changes nothing."""
    for optimizer_class in (SGD, AdamW):
        ours, one = strategy.pair(mlp, optimizer_class, lr=0.1)
        before = [local(parameter) for parameter in ours.model.parameters()]
        for has_trained in (False, True):
            if has_trained:
                ours.backward(0)
                ours.optimizer.zero_grad()
            ours.optimizer.step()
            for parameter, then in zip(ours.model.parameters(), before, strict=True):
                assert torch.equal(own(parameter), then)
        strategy.train_both(ours, one, 1)


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
