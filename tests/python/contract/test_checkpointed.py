"""Activation checkpoints: the bits of plain blocks, dropout on, under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import trireme
from torch import nn
from torch.utils.checkpoint import checkpoint

from contract.strategies import Strategy, on_every_strategy, set_requires_grad
from fsdp.ranks import SGD_OPTIONS, local, rows_of
from harness.models import mlp
from harness.training import Gradients, Training

Run = Callable[["Blocks", torch.Tensor], torch.Tensor]
again = trireme.checkpoint
torchs = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)


def once(function: Callable[..., Any], *inputs: Any) -> Any:
    """Stands where a checkpoint may stand."""
    return function(*inputs)


class Block(nn.Sequential):
    """Under fully_shard it is a unit; ``inside`` of it there may be a checkpoint."""

    def __init__(self, inside: Callable[..., Any]) -> None:
        super().__init__(nn.Linear(6, 13), nn.Tanh(), nn.Dropout(0.3), nn.Linear(13, 6))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(super().forward, x)


class Blocks(nn.Sequential):
    """Four blocks, run in the way that a test gives; ``outside`` of them checkpoints may be."""

    def __init__(self, run: Run, outside: Callable[..., Any], inside: Callable[..., Any]) -> None:
        torch.manual_seed(4)
        super().__init__(*(Block(inside) for _ in range(4)))
        self.run, self.outside = run, outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x.clone().requires_grad_())  # what torch's reentrant kind asks for


def each(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    for block in model:
        x = x + model.outside(block, x)
    return x


def some(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    """Blocks before and between the checkpointed ones; two of them in one checkpoint."""
    x = model.outside(lambda x: model[2](model[1](x)), model[0](x))
    return model.outside(model[3], x.tanh())


def in_and_out(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    """One block in two checkpoints and outside of them, another one unused."""
    x = model.outside(model[0], x) + model[0](x)
    return model.outside(model[1], model.outside(model[0], x)) + model[2](x)


def nested(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return model[1](model.outside(model[2], x))

    def outer(x: torch.Tensor) -> torch.Tensor:
        return model.outside(inner, model[0](x)) + x

    return model[3](model.outside(outer, x))


def all_in_one(model: Blocks, x: torch.Tensor) -> torch.Tensor:
    return model.outside(nn.Sequential(*model), x)


RUNS = (each, some, in_and_out, nested, all_in_one)
FROZEN = ("1.0.weight", "1.0.bias", "1.3.weight", "1.3.bias", "2.0.bias")


def training(
    strategy: Strategy,
    run: Run,
    outside: Callable[..., Any] = once,
    inside: Callable[..., Any] = once,
    frozen: Sequence[str] = (),
) -> Training:
    def make() -> nn.Module:
        model = Blocks(run, outside, inside)
        set_requires_grad(model, dict.fromkeys(frozen, False))
        return model

    return strategy.make(make, torch.optim.SGD, **SGD_OPTIONS)


def trained(ours: Training, steps: int = 4) -> Gradients:
    """Losses, gradients and parameters of each step, as this rank has them.

    The second step accumulates, the third has two forwards, the fourth two backwards of one.
    """
    seen: Gradients = []
    for step in range(steps):
        torch.manual_seed(10 * step + ours.rank)
        ours.optimizer.zero_grad()
        if step == 1:
            ours.backward(7, 8, sync=False)
        loss = ours.loss(step) + (ours.loss(9) if step == 2 else 0)
        if step == 3:
            loss.backward(retain_graph=True)
        loss.backward()
        seen += [loss.detach(), *(local(parameter.grad) for parameter in ours.model.parameters())]
        ours.optimizer.step()
        seen += [local(parameter) for parameter in ours.model.parameters()]
    return seen


def same_bits(found: Gradients, expected: Gradients) -> bool:
    return len(found) == len(expected) and all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


@on_every_strategy(needs=("passes", "own_forward"), timeout=100)
def test_bits_are_those_of_plain_blocks(rank: int, strategy: Strategy) -> None:
    """Whether checkpoints lie around units, in them, or both; with blocks that are frozen."""
    for run in RUNS:
        for frozen in ((), FROZEN):
            plain = trained(training(strategy, run, frozen=frozen))
            for where in ((again, once), (once, again), (again, again)):
                found = trained(training(strategy, run, *where, frozen=frozen))
                assert same_bits(found, plain), (run.__name__, frozen, where)


@on_every_strategy(needs=("passes", "own_forward"), timeout=100)
def test_torchs_checkpoints_beside_ours(rank: int, strategy: Strategy) -> None:
    """As one process, dropout off, in steps that accumulate, too."""
    for kind in (torchs, reentrant, again):
        for run in RUNS:

            def make(run: Run = run, kind: Callable[..., Any] = kind) -> nn.Module:
                return Blocks(run, kind, once).eval()

            ours, one = strategy.pair(make)
            for step in range(3):
                for training in (ours, one):
                    training.optimizer.zero_grad()
                    if step == 1:
                        training.backward(7, sync=False)
                    training.backward(*range(step, step + 1 + step // 2))
                strategy.step_both(ours, one)


@on_every_strategy()
def test_what_is_computed_again_inside_of_layers(rank: int, strategy: Strategy) -> None:
    for kind in (torchs, again):

        def make(kind: Callable[..., Any] = kind) -> nn.Module:
            return nn.Sequential(*Blocks(each, once, kind)).eval()

        ours, one = strategy.pair(make)
        for step in range(3):
            strategy.train_both(ours, one, *range(step, step + 1 + step % 2))


@on_every_strategy(needs=("passes",))
def test_a_whole_model_in_one(rank: int, strategy: Strategy) -> None:
    """From outside, as training of transformers often does; its input needs no gradient."""
    for kind in (torchs, again):
        ours, one = strategy.pair(mlp)
        for step in range(3):
            for training in (ours, one):
                training.optimizer.zero_grad()
                kind(training.net, rows_of(step, training)).square().mean().backward()
            strategy.step_both(ours, one)


@on_every_strategy(needs=("ranks", "passes"))
def test_random_numbers_are_what_makes_bits_equal(rank: int, strategy: Strategy) -> None:
    """Else the test above would prove nothing of them."""
    forgetful = partial(again, preserve_rng_state=False)
    plain, other = (trained(training(strategy, each, how), 1) for how in (once, forgetful))
    assert torch.equal(plain[0], other[0]) and not same_bits(plain, other)


@on_every_strategy(needs=("passes", "own_forward"), timeout=40)
def test_an_exception_in_the_recomputation(rank: int, strategy: Strategy) -> None:
    """It leaves the backward of its rank as it is, the others name it, and the next step works."""
    broken: list[bool] = []

    def run(model: Blocks, x: torch.Tensor) -> torch.Tensor:
        def part(x: torch.Tensor) -> torch.Tensor:
            if broken:
                raise ArithmeticError("the data of this rank are broken")
            return model[1](x)

        return model[3](model[2](model.outside(part, model[0](x))))

    ours = training(strategy, run, again)
    trained(ours, 1)
    for failing in range(ours.world) if strategy.recovers else [1]:
        loss = ours.loss(50)
        broken.extend([True] * (rank == failing))
        with strategy.abandons(ours, failing):
            loss.backward()
        broken.clear()
    if strategy.recovers:
        plain = training(strategy, run)
        trained(plain, 1)
        assert same_bits(trained(ours), trained(plain))
