"""Programs written for torch.distributed.pipelining, which run on torch's names and on ours.

    got = train(OURS, "1F1B", rank)
    expected = train(TORCHS, "1F1B", rank)

They differ in where the names are imported from. One process that runs the same micro-batches in
order is the second oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import trireme.pipelining
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.functional import mse_loss

from pipeline.ranks import WIDTH, rows

OURS: Any = trireme.pipelining
TORCHS: Any = SimpleNamespace(**{**vars(torch_schedules), "PipelineStage": PipelineStage})
SINGLE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
ALL = (*SINGLE, *LOOPED, *V_SHAPED)
MICRO_BATCHES = 4
CPU = torch.device("cpu")


class Block(nn.Module):
    """A stage of plain tensors."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(100 + number)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def own_numbers(name: str, rank: int, world: int) -> list[int]:
    """The stages of a rank."""
    if name in SINGLE:
        return [rank]
    return [rank, 2 * world - 1 - rank] if name in V_SHAPED else [rank, rank + world]


def count_of(name: str, world: int) -> int:
    """How many stages there are."""
    return world if name in SINGLE else 2 * world


@dataclass
class Trained:
    """What came out of steps on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def note(self, modules: dict[int, nn.Module]) -> None:
        for number, module in modules.items():
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None, (number, name)
                self.gradients[f"{number}.{name}"] = parameter.grad


def make_schedule(
    names: Any,
    name: str,
    modules: dict[int, nn.Module],
    *,
    stage_class: Any = None,
    micro_batches: int = MICRO_BATCHES,
    loss_fn: Any = mse_loss,
    stage_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A schedule of these stages."""
    stage_class = stage_class or names.PipelineStage
    count = count_of(name, dist.get_world_size())
    stages = [
        stage_class(module, number, count, CPU, **(stage_options or {}))
        for number, module in modules.items()
    ]
    found = names.get_schedule_class(name)
    return found(stages[0] if name in SINGLE else stages, micro_batches, loss_fn, **options)


def train(
    names: Any,
    name: str,
    *,
    make: Callable[[int], nn.Module] = Block,
    steps: int = 2,
    rows_of_batch: int = 8,
    **options: Any,
) -> Trained:
    """Trains as a program for torch does: inputs on the first rank, targets on the last stage's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    modules = {number: make(number) for number in own_numbers(name, rank, world)}
    schedule = make_schedule(names, name, modules, **options)
    trained = Trained()
    for step in range(steps):
        args = (rows(2 * step, rows_of_batch),) if 0 in modules else ()
        target = None
        losses: list[Tensor] = []
        if count_of(name, world) - 1 in modules:
            target = rows(2 * step + 1, rows_of_batch)
        for module in modules.values():
            module.zero_grad()
        output = schedule.step(*args, target=target, losses=losses)
        assert (output is None) == (target is None)
        if output is not None:
            assert len(losses) == schedule._n_microbatches
            trained.outputs.append(output.detach())
            trained.losses += [loss.detach() for loss in losses]
    trained.note(modules)
    return trained


def train_alone(
    name: str,
    world: int,
    *,
    make: Callable[[int], nn.Module] = Block,
    steps: int = 2,
    rows_of_batch: int = 8,
    scale_grads: bool = True,
) -> Trained:
    """One process runs the micro-batches one after the other."""
    layers = [make(number) for number in range(count_of(name, world))]
    trained = Trained()
    for step in range(steps):
        outputs = []
        for layer in layers:
            layer.zero_grad()
        inputs = rows(2 * step, rows_of_batch).tensor_split(MICRO_BATCHES)
        targets = rows(2 * step + 1, rows_of_batch).tensor_split(MICRO_BATCHES)
        for value, target in zip(inputs, targets, strict=True):
            for layer in layers:
                value = layer(value)
            loss = mse_loss(value, target)
            loss.backward()
            outputs.append(value.detach())
            trained.losses.append(loss.detach())
        trained.outputs.append(torch.cat(outputs))
        for layer in layers:
            for parameter in layer.parameters():
                if scale_grads and parameter.grad is not None:
                    parameter.grad /= MICRO_BATCHES
    trained.note(dict(enumerate(layers)))
    return trained


def assert_same(got: Trained, expected: Trained, *, exact: bool = True) -> None:
    """Compares what this rank has; ``expected`` may have more."""
    for number, (one, other) in enumerate(zip(got.losses, expected.losses, strict=False)):
        assert torch.equal(one, other), (number, one, other)
    for one, other in zip(got.outputs, expected.outputs, strict=False):
        assert torch.equal(one, other)
    assert got.gradients
    for name, gradient in got.gradients.items():
        if exact:
            assert torch.equal(gradient, expected.gradients[name]), name
        else:
            torch.testing.assert_close(gradient, expected.gradients[name])
