"""What the tests of ZeroRedundancyOptimizer share: models, data, one process as the oracle.

    @on_shm_ranks(2)
    def test_something(rank: int) -> None:
        one, ours = alone(mlp, AdamW, lr=0.01), sharded(mlp, AdamW, 2, lr=0.01)
        for step in range(3):
            train_both(ours, one, step)

Every step of the sharded training is compared with that of one process on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from harness.training import Gradients, Training, assert_equal_parameters

STAGES = pytest.mark.parametrize("stage", [1, 2])
DDP = trireme.DistributedDataParallel
Zero = trireme.ZeroRedundancyOptimizer


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


def train_both(ours: Training, one: Training, *numbers: int) -> None:
    """One step on these batches; compares parameters."""
    for training in (ours, one):
        training.train(*numbers)
    assert_equal_parameters(ours.model, one.model)


def assert_trains_as_one_process(ours: Training, one: Training, steps: int = 5) -> None:
    for step in range(steps):
        train_both(ours, one, step)
