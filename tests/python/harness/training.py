"""Training under any strategy, and the oracle: one process on whole batches.

one, ours = alone(mlp, AdamW, lr=0.01), sharded(mlp, AdamW, 2, lr=0.01)
for step in range(3):
    for training in (ours, one):
        training.train(step)
    assert_equal_parameters(ours.model, one.model)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.models import batch


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies, by the name inside the wrapper."""
    module = model.module if isinstance(model, (TorchDDP, nn.DataParallel)) else model
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of parameters and buffers, by the name inside the wrapper."""
    module = model.module if isinstance(model, (TorchDDP, nn.DataParallel)) else model
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same_on_all_ranks(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        mine = tensor.detach().contiguous()
        of_rank_0 = mine.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(mine, of_rank_0), "ranks drifted apart"


ROWS = 12  # in every batch: as many for each rank, in every world that is tested


Gradients = list[torch.Tensor | None]


@dataclass
class Training:
    """A model and its optimizer on rows ``rank::world`` of every batch."""

    model: nn.Module
    net: nn.Module
    """What is called: the model, or the module that wraps it."""
    optimizer: Any
    rank: int = 0
    world: int = 1

    def loss(self, number: int) -> torch.Tensor:
        return self.net(batch(number, rows=ROWS)[self.rank :: self.world]).square().mean()

    def backward(self, *numbers: int, sync: bool = True) -> None:
        """One backward for each batch. Without ``sync`` ranks only accumulate."""
        averaging = self.net if self.net is not self.model else self.optimizer
        accumulates = not sync and self.world > 1
        with averaging.no_sync() if accumulates else nullcontext():
            for number in numbers:
                self.loss(number).backward()

    def counterparts(self, one: Training) -> list[nn.Parameter]:
        """The parameters of one process that this rank has, or has parts of."""
        theirs = dict(one.model.named_parameters())
        assert [name for name, _ in self.model.named_parameters()] == list(theirs)
        return list(theirs.values())

    def train(self, *numbers: int) -> None:
        """One step on these batches."""
        self.optimizer.zero_grad()
        self.backward(*numbers)
        self.optimizer.step()


def backward_by_rank(ours: Training, one: Training, number: int, given: Sequence[Any]) -> None:
    """The forward of rank r gets ``given[r]`` beside its rows; one process runs all of them."""
    rows = batch(number, rows=ROWS)
    ours.net(rows[ours.rank :: ours.world], given[ours.rank]).square().mean().backward()
    for rank, its in enumerate(given):
        (one.net(rows[rank :: ours.world], its).square().mean() / ours.world).backward()


def accumulate_both(
    ours: Training, one: Training, step_both: Callable[[Training, Training], None]
) -> None:
    """Steps with and without averaging in between, and what the last step left."""
    # How a step begins, then (batch, whether averaged) of its backwards.
    steps: list[tuple[bool, list[tuple[int, bool]]]] = [
        (True, [(0, True), (1, True)]),
        (True, [(2, True), (3, True), (4, True)]),
        (False, [(5, True)]),
        (True, [(6, False), (7, True)]),
        (True, [(8, True), (9, False), (10, True)]),
        (False, [(11, True), (12, False), (13, False), (14, True)]),
        (False, [(15, False), (16, True), (17, True)]),
        (True, [(18, True)]),
    ]
    for set_to_none, backwards in steps:
        for training in (ours, one):
            training.optimizer.zero_grad(set_to_none=set_to_none)
            for number, sync in backwards:
                training.backward(number, sync=sync)
        step_both(ours, one)


def alone(make: Callable[[], nn.Module], optimizer_class: Any, **defaults: Any) -> Training:
    """One process on whole batches."""
    model = make()
    return Training(model, model, optimizer_class(model.parameters(), **defaults))


def scale(model: nn.Module, factor: float = 2.0) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def assert_close(
    name: str, got: torch.Tensor | None, expected: torch.Tensor | None, **tolerance: Any
) -> None:
    """Equal but for the order of sums: in fp32, also where fp64 takes what fp32 computed."""
    if expected is not None and expected.dtype == torch.bfloat16:
        tolerance = {"rtol": 0.05, "atol": 1e-2, **tolerance}
    elif expected is not None:
        tolerance = {"rtol": 5e-6, "atol": 1e-5, **tolerance}
    torch.testing.assert_close(got, expected, **tolerance, msg=lambda text: f"{name}: {text}")


def assert_equal_parameters(got: nn.Module, expected: nn.Module, **tolerance: Any) -> None:
    """Compares with those of one process, but for the order of sums; the same bits on all ranks."""
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert_close(name, one, other, **tolerance)
    assert_same_on_all_ranks(list(got.parameters()))
