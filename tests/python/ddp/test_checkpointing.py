"""Activation checkpoints, torch's two kinds and ours: layers run again in backward, some twice."""

from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.faults import raises
from harness.models import batch
from harness.on_ranks import WORLD, on_ranks
from harness.training import gradients

Run = Callable[[nn.Module, torch.Tensor, str], torch.Tensor]


class Layers(nn.Module):
    """Four layers, run in the way that the test gives."""

    def __init__(self, run: Run, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.run = run
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x, self.kind)


def again(layer: nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "ours":
        return trireme.checkpoint(layer, x)
    return checkpoint(layer, x, use_reentrant=kind == "reentrant")


def some_layers(model: nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Layers before, between and after the checkpointed ones."""
    x = model.layers[0](x).tanh()
    x = again(model.layers[1], x, kind).tanh()
    x = model.layers[2](x).tanh()
    return again(model.layers[3], x, kind)


def one_layer_twice(model: nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
    x = again(model.layers[0], x, kind).tanh()
    x = model.layers[1](x).tanh()
    x = again(model.layers[0], x, kind).tanh()
    return model.layers[3](x) + model.layers[2](x)


def checkpointed_and_plain(model: nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
    x = again(model.layers[0], x, kind).tanh()
    x = model.layers[0](x).tanh()
    return again(model.layers[1], x, kind)


def one_process(run: Run, step: int) -> dict[str, torch.Tensor | None]:
    alone = Layers(run, "plain")
    alone(batch(step)).square().mean().backward()
    return gradients(alone)


def backward(model: nn.Module, step: int, rank: int) -> None:
    # Reentrant checkpoints only run backward where an input asks for a gradient.
    x = batch(step)[rank::WORLD].requires_grad_()
    model(x).square().mean().backward()


@on_ranks()
def test_a_pipeline_stage_with_reentrant_checkpoints(rank: int) -> None:
    """Asked for by the reducer and not by the forward, the end is that of the outer backward."""
    ddp = trireme.DistributedDataParallel(Layers(some_layers, "reentrant"), bucket_cap_mb=0.0001)
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            loss = ddp(batch(step)[rank::WORLD].requires_grad_()).square().mean()
        ddp.reducer.prepare_for_backward([])
        loss.backward()
        torch.testing.assert_close(gradients(ddp), one_process(some_layers, step))


OPTIONS = [{"find_unused_parameters": True}, {"static_graph": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@on_ranks()
def test_what_torch_needs_for_some_of_these(rank: int, options: dict[str, bool]) -> None:
    """Options of torch's class that change nothing here: one layer is used twice, one never."""
    for run in (one_layer_twice, checkpointed_and_plain):
        ddp = trireme.DistributedDataParallel(Layers(run, "ours"), **options)
        for step in range(3):
            ddp.zero_grad()
            backward(ddp, step, rank)
            torch.testing.assert_close(gradients(ddp), one_process(run, step))


@on_ranks()
def test_more_gradients_than_in_the_step_before_are_refused(rank: int) -> None:
    """A reentrant layer that suddenly comes twice, when its bucket has been sent already."""
    runs = {"now": some_layers}
    module = Layers(lambda model, x, kind: runs["now"](model, x, kind), "reentrant")
    ddp = trireme.DistributedDataParallel(module, bucket_cap_mb=0.0001)
    for step in range(3):
        backward(ddp, step, rank)

    def last_layer_twice(model: nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
        return again(model.layers[3], some_layers(model, x, kind), kind)

    runs["now"] = last_layer_twice
    with raises(NotImplementedError, "[ddp] got 'layers.3.", "further gradient", "use_reentrant"):
        backward(ddp, 3, rank)
