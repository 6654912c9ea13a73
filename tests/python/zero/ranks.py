"""What the tests of ZeroRedundancyOptimizer share: models, data, one process as the oracle.

    @on_shm_ranks(2)
    def test_something(rank: int) -> None:
        one, ours = alone(mlp, AdamW, lr=0.01), sharded(mlp, AdamW, 2, lr=0.01)
        for step in range(3):
            train_both(ours, one, step)

Every step of the sharded training is compared with that of one process on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.nn import functional

from ddp.ranks import assert_same_on_all_ranks, batch

ROWS = 12  # in every batch: as many for each rank, in every world that is tested
STAGES = pytest.mark.parametrize("stage", [1, 2])
DDP = trireme.DistributedDataParallel
Zero = trireme.ZeroRedundancyOptimizer
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


def sharded(
    make: Callable[[], nn.Module],
    optimizer_class: Any,
    stage: int,
    options: dict[str, Any] | None = None,
    **defaults: Any,
) -> Training:
    """This rank's part; under stage 1 our DDP averages. ``options`` are not the optimizer's own."""
    model = make()
    net = DDP(model) if stage == 1 else model
    given = {"stage": stage, **(options or {}), **defaults}
    optimizer = Zero(model.parameters(), optimizer_class, **given)
    return Training(model, net, optimizer, dist.get_rank(), dist.get_world_size())


def own_parts(training: Training, gradients: Iterable[torch.Tensor | None]) -> Gradients:
    """What this rank owns of gradients of whole parameters, and zeros in place of the rest."""
    parts: Gradients = []
    plan = (ranges for core in training.optimizer._cores for ranges in core.plan())
    for gradient, ranges in zip(gradients, plan, strict=True):
        begin, numel = ranges[training.rank]
        part = None if gradient is None else torch.zeros(gradient.shape, dtype=gradient.dtype)
        if part is not None:
            part.view(-1)[begin : begin + numel] = gradient.reshape(-1)[begin : begin + numel]
        parts.append(part)
    return parts


def whole_state(optimizer: Any) -> dict[str, Any]:
    """What is consolidated on each rank in turn."""
    for rank in range(dist.get_world_size(optimizer.process_group)):
        optimizer.consolidate_state_dict(rank)
        if rank == dist.get_rank(optimizer.process_group):
            found = optimizer.state_dict()
    return found


def scale(model: nn.Module, factor: float = 2.0) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


class Shapes(nn.Module):
    """Fewer rows than ranks, a scalar, one without elements, turned memory, four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 13)
        self.turned = nn.Parameter(torch.randn(13, 5).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.wide = nn.Linear(5, 3).double()
        self.narrow = nn.Linear(5, 1).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(self.first(x).tanh(), self.turned).tanh() * self.scale
        wide = self.wide(hidden.double()).float()
        wide = wide + torch.view_as_real(wide * self.phase).mean(-1)
        # Detached: what is rounded to 8 bits has no say in the other gradients.
        narrow = self.narrow(hidden.detach().bfloat16()).float()
        return torch.cat([wide, narrow], dim=1) + self.empty.sum()


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


def train_both(ours: Training, one: Training, *numbers: int) -> None:
    """One step on these batches; compares parameters."""
    for training in (ours, one):
        training.train(*numbers)
    assert_equal_parameters(ours.model, one.model)


def assert_trains_as_one_process(ours: Training, one: Training, steps: int = 5) -> None:
    for step in range(steps):
        train_both(ours, one, step)
