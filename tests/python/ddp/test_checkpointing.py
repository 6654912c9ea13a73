"""Activation checkpointing, both kinds: layers run again inside backward, some several times."""

from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp.ranks import WORLD, batch, gradients, on_ranks, raises

Run = Callable[[nn.Module, torch.Tensor, bool], torch.Tensor]


class Layers(nn.Module):
    """Four layers, run in the way that the test gives."""

    def __init__(self, run: Run, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.run = run
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x, self.reentrant)


def again(layer: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=reentrant)


def each_layer(model: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    for layer in model.layers:
        x = again(layer, x, reentrant).tanh()
    return x


def some_layers(model: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    """Layers before, between and after the checkpointed ones."""
    x = model.layers[0](x).tanh()
    x = again(model.layers[1], x, reentrant).tanh()
    x = model.layers[2](x).tanh()
    return again(model.layers[3], x, reentrant)


def one_layer_twice(model: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    x = again(model.layers[0], x, reentrant).tanh()
    x = model.layers[1](x).tanh()
    x = again(model.layers[0], x, reentrant).tanh()
    return model.layers[3](x) + model.layers[2](x)


def checkpointed_and_plain(model: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    x = again(model.layers[0], x, reentrant).tanh()
    x = model.layers[0](x).tanh()
    return again(model.layers[1], x, reentrant)


def nested(model: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        x = model.layers[0](x).tanh()
        return model.layers[2](again(model.layers[1], x, reentrant).tanh())

    return model.layers[3](again(outer, x, reentrant).tanh())


def all_in_one(model: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return again(lambda x: nn.Sequential(*model.layers)(x), x, reentrant)


RUNS = [
    each_layer,
    some_layers,
    one_layer_twice,
    checkpointed_and_plain,
    nested,
    all_in_one,
]


def one_process(run: Run, step: int) -> dict[str, torch.Tensor | None]:
    alone = Layers(run, False)
    alone(batch(step)).square().mean().backward()
    return gradients(alone)


def backward(model: nn.Module, step: int, rank: int) -> None:
    # Reentrant checkpoints only run backward where an input asks for a gradient.
    x = batch(step)[rank::WORLD].requires_grad_()
    model(x).square().mean().backward()


@pytest.mark.parametrize("cap", [0.0001, 25])
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("run", RUNS)
@on_ranks()
def test_equals_one_process(rank: int, run: Run, reentrant: bool, cap: float) -> None:
    ddp = trireme.DistributedDataParallel(Layers(run, reentrant), bucket_cap_mb=cap)
    for step in range(4):
        ddp.zero_grad()
        backward(ddp, step, rank)
        torch.testing.assert_close(gradients(ddp), one_process(run, step))


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@on_ranks()
def test_accumulation(rank: int, reentrant: bool) -> None:
    ddp = trireme.DistributedDataParallel(Layers(one_layer_twice, reentrant))
    for first in (0, 2):
        ddp.zero_grad()
        with ddp.no_sync():
            backward(ddp, first, rank)
        backward(ddp, first + 1, rank)
        one, other = (one_process(one_layer_twice, step) for step in (first, first + 1))
        torch.testing.assert_close(gradients(ddp), {name: one[name] + other[name] for name in one})


@on_ranks()
def test_a_pipeline_stage_with_reentrant_checkpoints(rank: int) -> None:
    """Asked for by the reducer and not by the forward, the end is that of the outer backward."""
    ddp = trireme.DistributedDataParallel(Layers(some_layers, True), bucket_cap_mb=0.0001)
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            loss = ddp(batch(step)[rank::WORLD].requires_grad_()).square().mean()
        ddp.reducer.prepare_for_backward([])
        loss.backward()
        torch.testing.assert_close(gradients(ddp), one_process(some_layers, step))


@on_ranks()
def test_all_of_a_model_without_input_gradients(rank: int) -> None:
    """The whole module is checkpointed from outside, as transformer training often does."""
    ddp = trireme.DistributedDataParallel(Layers(each_layer, False))
    for step in range(3):
        ddp.zero_grad()
        output = checkpoint(ddp, batch(step)[rank::WORLD], use_reentrant=False)
        output.square().mean().backward()
        torch.testing.assert_close(gradients(ddp), one_process(each_layer, step))


@on_ranks()
def test_more_gradients_than_in_the_step_before_are_refused(rank: int) -> None:
    """A reentrant layer that suddenly comes twice, when its bucket has been sent already."""
    runs = {"now": some_layers}
    module = Layers(lambda model, x, reentrant: runs["now"](model, x, reentrant), True)
    ddp = trireme.DistributedDataParallel(module, bucket_cap_mb=0.0001)
    for step in range(3):
        backward(ddp, step, rank)

    def last_layer_twice(model: nn.Module, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        return again(model.layers[3], some_layers(model, x, reentrant), reentrant)

    runs["now"] = last_layer_twice
    with raises(NotImplementedError, "[ddp] got 'layers.3.", "further gradient", "use_reentrant"):
        backward(ddp, 3, rank)
