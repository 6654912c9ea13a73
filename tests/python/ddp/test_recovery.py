"""On shared memory a backward that one rank abandons raises on all, and the next step works."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp.fragile import Fragile
from ddp.ranks import backward
from harness.faults import in_case, raises
from harness.models import batch, mlp
from harness.on_ranks import AGES_S, WORLD, on_ranks
from harness.training import assert_same_on_all_ranks, gradients


def assert_next_steps_work(ddp: nn.Module, rank: int, steps: int = 3) -> None:
    """Gradients equal those of one process on the whole batch."""
    alone = type(ddp.module)() if isinstance(ddp.module, Fragile) else mlp()
    alone.load_state_dict(ddp.module.state_dict())
    for step in range(10, 10 + steps):
        for model, rows in ((ddp, batch(step)[rank::WORLD]), (alone, batch(step))):
            model.zero_grad()
            model(rows).square().mean().backward()
        torch.testing.assert_close(gradients(ddp), gradients(alone))


def fail_once(ddp: nn.Module, step: int, rank: int, failing: int, *parts: str) -> None:
    loss = ddp(batch(step)[rank :: dist.get_world_size()], breaks=rank == failing).sum()
    if rank == failing:
        with pytest.raises(ArithmeticError, match="the data of this rank"):
            loss.backward()
    else:
        with raises(dist.DistBackendError, *parts, f"(rank {rank} of "):
            loss.backward()


def hooked(ddp: nn.Module) -> None:
    ddp.register_comm_hook(None, allreduce_hook)


@on_ranks(timeout=60, patience_s=AGES_S, backend="trireme")
def test_the_next_step_works(rank: int) -> None:
    """Where gradients stream, and where a hook takes buckets."""
    for prepare, steps_before, failing in itertools.product((None, hooked), (0, 3), (0, 1)):
        ddp = trireme.DistributedDataParallel(Fragile(), bucket_cap_mb=0.0001)
        if prepare:
            prepare(ddp)
        for step in range(steps_before):
            backward(ddp, step, rank)
        said = f"backward {steps_before + 1} was abandoned after the gradient of 'last."
        with in_case(f"{prepare=}, {steps_before=}, {failing=}"):
            fail_once(ddp, steps_before, rank, failing, said, f"(rank {failing} of 2)")
            assert_next_steps_work(ddp, rank)


@pytest.mark.parametrize("world", [3, 5])
@on_ranks("world", timeout=60, patience_s=AGES_S, backend="trireme")
def test_all_ranks_of_more_learn_of_it_and_go_on(rank: int, world: int) -> None:
    """Three ranks stream, five send buckets."""
    ddp = trireme.DistributedDataParallel(Fragile(), bucket_cap_mb=0.0001)
    for failing in (world - 1, 1):
        ddp.zero_grad()
        ddp(batch(1, rows=30)[rank::world]).square().mean().backward()
        ddp.zero_grad()
        fail_once(ddp, 0, rank, failing, "was abandoned")
    ddp.zero_grad()
    ddp(batch(2, rows=30)[rank::world]).square().mean().backward()
    alone = Fragile()
    alone.load_state_dict(ddp.module.state_dict())
    alone(batch(2, rows=30)).square().mean().backward()
    torch.testing.assert_close(gradients(ddp), gradients(alone))


class FragileNorm(Fragile):
    """Collectives of its own in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = trireme.SyncBatchNorm(6)

    def forward(self, x: torch.Tensor, breaks: bool = False) -> torch.Tensor:
        return super().forward(self.norm(x), breaks)


@on_ranks(timeout=40, patience_s=AGES_S, backend="trireme")
def test_a_collective_of_the_model_itself_is_given_up(rank: int) -> None:
    """Rank 1 waits for rank 0 in SyncBatchNorm's backward, which rank 0 never reaches."""
    ddp = trireme.DistributedDataParallel(FragileNorm())
    backward(ddp, 0, rank)
    for step in (1, 3):
        ddp.zero_grad()
        fail_once(ddp, step, rank, 0, "was abandoned")
        ddp.zero_grad()
        backward(ddp, step + 1, rank)
        assert_same_on_all_ranks([parameter.grad for parameter in ddp.parameters()])


@on_ranks(timeout=40, patience_s=AGES_S, backend="trireme")
def test_two_modules_of_a_group_go_on(rank: int) -> None:
    """The exception leaves both modules' backward; collectives of the user go on as well."""
    first = trireme.DistributedDataParallel(Fragile())
    second = trireme.DistributedDataParallel(mlp())
    for step in range(4):
        rows = batch(step)[rank::WORLD]
        loss = first(rows, breaks=step % 2 == 1 and rank == 1).sum() + second(rows).sum()
        if step % 2 == 0:
            loss.backward()
            assert_same_on_all_ranks([p.grad for m in (first, second) for p in m.parameters()])
        else:
            with pytest.raises((ArithmeticError, dist.DistBackendError)):
                loss.backward()
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [2, 2, 2]
        first.zero_grad()
        second.zero_grad()
    assert_next_steps_work(second, rank)


@on_ranks(3, timeout=40, patience_s=AGES_S, backend="trireme", dying=(2,))
def test_a_rank_that_does_not_go_on_is_named(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Fragile())
    fail_once(ddp, 0, rank, 2, "was abandoned", "(rank 2 of 3)")
    if rank == 2:
        os._exit(0)
    with raises(dist.DistBackendError, "rank 2 (process", "has died"):
        ddp(batch(1))
