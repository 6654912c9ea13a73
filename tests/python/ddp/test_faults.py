"""A rank fails, or does something else: the others raise in time, naming rank and operation."""

import itertools

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from ddp.fragile import Fragile
from ddp.ranks import backward
from harness.faults import in_case, raises
from harness.meeting import meet_again, set_timeout
from harness.models import batch, mlp
from harness.on_ranks import AGES_S, WORLD, on_gloo_ranks, on_ranks


@on_gloo_ranks(timeout=60, patience_s=AGES_S)
def test_an_exception_in_the_middle_of_a_backward(rank: int) -> None:
    """The group cannot go on, and can be rebuilt, as the message tells the user to do."""
    module = Fragile()
    for failing, step in itertools.product((0, 1), (0, 3)):
        with in_case(f"{failing=}, {step=}"):
            fail_in_backward(module, rank, failing, step)
            meet_again(f"after {failing}, {step}", AGES_S)
            module.zero_grad()
    backward(trireme.DistributedDataParallel(module), 0, rank)
    dist.barrier()


def fail_in_backward(module: nn.Module, rank: int, failing: int, step: int) -> None:
    ddp = trireme.DistributedDataParallel(module, bucket_cap_mb=0.0001)
    for number in range(step):
        backward(ddp, number, rank)
    loss = ddp(batch(step)[rank::WORLD], breaks=rank == failing).sum()
    if rank == failing:
        with pytest.raises(ArithmeticError, match="the data of this rank"):
            loss.backward()
    else:
        with raises(
            dist.DistBackendError,
            "was given up because a peer announced",
            f"backward {step + 1} was abandoned after the gradient of 'last.",
            "An exception left it: ArithmeticError: the data of this rank",
            f"(rank {failing} of 2)",
        ):
            loss.backward()
    parts = ("got a forward after the group had failed", f"(rank {failing} of 2)", "wrap")
    with raises(dist.DistBackendError, *parts, f"(rank {rank} of 2)"):
        ddp(batch(0))


@on_ranks(patience_s=AGES_S)
def test_an_exception_before_any_gradient(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Fragile())
    ddp.module.last.bias.register_hook(lambda grad: 1 / 0 if rank == 0 else grad)
    loss = ddp(batch(0)[rank::WORLD]).sum()
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    else:
        with raises(dist.DistBackendError, "was abandoned before any gradient arrived"):
            loss.backward()


@on_ranks(patience_s=AGES_S)
def test_an_exception_under_no_sync_concerns_nobody(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Fragile())
    if rank == 1:
        with ddp.no_sync(), pytest.raises(ArithmeticError):
            ddp(batch(0), breaks=True).sum().backward()
    ddp.zero_grad()
    backward(ddp, 1, rank)
    backward(ddp, 2, rank)


@on_gloo_ranks(timeout=40, patience_s=AGES_S)
def test_ranks_that_run_apart_report_what_they_wait_for(rank: int) -> None:
    """Rank 1 takes part in a collective of its own: both time out, and each tells of the other."""
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    other = dist.new_group([0, 1])
    late = trireme.DistributedDataParallel(nn.Linear(2, 2), process_group=other)
    for group in (dist.group.WORLD, other):
        set_timeout(3, group)
    with raises(dist.DistBackendError, "failed", f"(rank {rank} of 2)"):
        if rank == 0:
            backward(ddp, 1, rank)
        else:
            late(torch.ones(1, 2)).sum().backward()
