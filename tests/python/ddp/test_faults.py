"""A rank fails, is killed or leaves: the others raise in time, naming rank and operation."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from ddp.ranks import (
    AGES_S,
    HOUSE_FORM,
    WORLD,
    batch,
    message_of,
    mlp,
    on_gloo_ranks,
    on_ranks,
    raises,
    say,
    set_timeout,
    stay_until,
)


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step)[rank::WORLD]).square().mean().backward()


class Breaks(torch.autograd.Function):
    """The identity; its backward raises when told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, breaks: bool) -> torch.Tensor:
        ctx.breaks = breaks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.breaks:
            raise ArithmeticError("the data of this rank are broken")
        return grad, None


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, breaks: bool = False) -> torch.Tensor:
        return self.last(Breaks.apply(self.first(x), breaks))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("step", [0, 3])
@on_gloo_ranks(timeout=40, patience_s=AGES_S)
def test_an_exception_in_the_middle_of_a_backward(rank: int, failing: int, step: int) -> None:
    ddp = trireme.DistributedDataParallel(Fragile(), bucket_cap_mb=0.0001)
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


@on_ranks(timeout=40)
def test_the_group_can_be_rebuilt(rank: int) -> None:
    """What the message tells the user to do."""
    module = Fragile()
    ddp = trireme.DistributedDataParallel(module)
    with pytest.raises((ArithmeticError, dist.DistBackendError)):
        ddp(batch(0)[rank::WORLD], breaks=rank == 0).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=WORLD
    )
    module.zero_grad()
    ddp = trireme.DistributedDataParallel(module)
    backward(ddp, 0, rank)
    dist.barrier()


def run_until_killed(rank: int, when: str) -> str:
    """Rank 1 dies at the given moment of step 2; what rank 0 raises is returned."""
    dist.init_process_group("gloo")
    ddp = trireme.DistributedDataParallel(Fragile(), bucket_cap_mb=0.0001)

    def die(*_: object) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        for step in range(4):
            if step == 2:
                if when == "before forward":
                    die()
                if when == "in backward":
                    ddp.module.first.weight.register_hook(die)
            loss = ddp(batch(step)[rank::WORLD]).square().mean()
            if step == 2 and when == "before backward":
                die()
            loss.backward()
            if step == 2 and when == "after backward":
                die()
    except dist.DistBackendError as error:
        return message_of(error)
    raise AssertionError("rank 0 finished without its peer")


@pytest.mark.parametrize(
    "when", ["before forward", "before backward", "in backward", "after backward"]
)
def test_a_killed_rank(when: str) -> None:
    from distributed import run_ranks

    text = run_ranks(run_until_killed, WORLD, when, timeout=40, dying=(1,))[0]
    assert HOUSE_FORM.match(text), text
    for part in ("all_reduce of bucket", "(rank 0 of 2)", "rank 1 (process ", "left no word"):
        assert part in text, text


@on_gloo_ranks(timeout=40, patience_s=AGES_S)
def test_a_rank_that_does_not_come(rank: int) -> None:
    """It lives but never runs its backward: the group's timeout ends the wait, with a report."""
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    if rank == 0:
        set_timeout(3)
        with raises(
            dist.DistBackendError,
            "all_reduce of bucket 0: 4.bias .. 0.weight failed",
            "This rank waited in step 2 for all_reduce of bucket 0",
            "rank 1 (process ",
            "has left no report (it is alive, ",
        ):
            backward(ddp, 1, rank)
        say("rank 0 is done")
    else:
        stay_until("rank 0 is done")


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
