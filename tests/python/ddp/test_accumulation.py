"""Gradient accumulation: which forwards and backwards synchronize, and what they average.

The oracle is plain autograd: each rank's gradients without DDP, averaged where DDP should.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import trireme
from torch import nn

from ddp.ranks import loss_of
from harness.models import mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import gradients

Gradients = dict[str, torch.Tensor | None]


def local_gradients(*losses: tuple[int, int]) -> Gradients:
    """The sum of the gradients of the losses (step, rank), of one process."""
    model = mlp()
    for step, rank in losses:
        loss_of(model, step, rank).backward()
    return gradients(model)


def averaged(*steps: int) -> Gradients:
    """What the sum of the steps' gradients is after a synchronization."""
    both = [local_gradients(*((step, rank) for step in steps)) for rank in range(WORLD)]
    return {name: sum(gradients[name] for gradients in both) / WORLD for name in both[0]}


def plus(one: Gradients, other: Gradients) -> Gradients:
    return {name: one[name] + other[name] for name in one}


@pytest.mark.parametrize("as_bucket_view", [False, True])
@on_ranks()
def test_no_sync_then_sync(rank: int, as_bucket_view: bool) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), gradient_as_bucket_view=as_bucket_view)
    for first in (0, 10, 20):  # three optimizer steps, each of three micro batches
        ddp.zero_grad()
        with ddp.no_sync():
            for step in range(first, first + 2):
                loss_of(ddp, step, rank).backward()
            torch.testing.assert_close(gradients(ddp), local_gradients((first, rank), (step, rank)))
        loss_of(ddp, first + 2, rank).backward()
        torch.testing.assert_close(gradients(ddp), averaged(first, first + 1, first + 2))


@on_ranks()
def test_the_forward_decides(rank: int) -> None:
    """It does so in torch: no_sync() around the backward alone changes nothing."""
    ddp = trireme.DistributedDataParallel(mlp())
    loss = loss_of(ddp, 0, rank)
    with ddp.no_sync():
        loss.backward()
    torch.testing.assert_close(gradients(ddp), averaged(0))
    ddp.zero_grad()
    with ddp.no_sync():
        loss = loss_of(ddp, 1, rank)
    loss.backward()
    torch.testing.assert_close(gradients(ddp), local_gradients((1, rank)))


@on_ranks()
def test_a_synced_backward_before_an_older_unsynced_one(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    with ddp.no_sync():
        older = loss_of(ddp, 0, rank)
    loss_of(ddp, 1, rank).backward()
    torch.testing.assert_close(gradients(ddp), averaged(1))
    older.backward()
    torch.testing.assert_close(gradients(ddp), plus(averaged(1), local_gradients((0, rank))))


@on_ranks()
def test_one_synced_forward_among_those_of_a_backward(rank: int) -> None:
    """A backward that reaches one synced output averages all that it brings."""
    ddp = trireme.DistributedDataParallel(mlp())
    with ddp.no_sync():
        quiet = loss_of(ddp, 0, rank)
    (quiet + loss_of(ddp, 1, rank)).backward()
    torch.testing.assert_close(gradients(ddp), averaged(0, 1))


def one_forward_one_backward(ddp: nn.Module, rank: int, synced: Callable[[int], bool]) -> None:
    """f0 f1 b0 f2 b1 f3 b2 b3, micro batch i in no_sync() unless ``synced(i)``."""
    pending = []
    for micro in range(4):
        with nullcontext() if synced(micro) else ddp.no_sync():
            pending.append(loss_of(ddp, micro, rank))
        if micro >= 1:
            pending.pop(0).backward()
    pending.pop(0).backward()


@on_ranks()
def test_interleaved_micro_batches(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    for _ in range(2):
        ddp.zero_grad()
        one_forward_one_backward(ddp, rank, synced=lambda micro: micro == 3)
        torch.testing.assert_close(gradients(ddp), averaged(0, 1, 2, 3))


@on_ranks()
def test_prepare_for_backward_synchronizes_an_unsynced_forward(rank: int) -> None:
    """What torch's pipelining does before its last backward."""
    ddp = trireme.DistributedDataParallel(mlp())
    with ddp.no_sync():
        first, second = loss_of(ddp, 0, rank), loss_of(ddp, 1, rank)
        first.backward()
        ddp.reducer.prepare_for_backward([])
        second.backward()
    torch.testing.assert_close(gradients(ddp), averaged(0, 1))
    with ddp.no_sync():  # only that one
        loss_of(ddp, 2, rank).backward()
    torch.testing.assert_close(gradients(ddp), plus(averaged(0, 1), local_gradients((2, rank))))


@on_ranks()
def test_ranks_accumulate_different_numbers_of_micro_batches(rank: int) -> None:
    """no_sync() steps are local: ranks need not take the same number of them."""
    ddp = trireme.DistributedDataParallel(mlp())
    with ddp.no_sync():
        for step in range(1 + 2 * rank):
            loss_of(ddp, step, rank).backward()
    loss_of(ddp, 5, rank).backward()
    parts = [
        local_gradients(*((step, of) for step in [*range(1 + 2 * of), 5])) for of in range(WORLD)
    ]
    expected = {name: (parts[0][name] + parts[1][name]) / WORLD for name in parts[0]}
    torch.testing.assert_close(gradients(ddp), expected)
