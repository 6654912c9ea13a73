"""Backward that returns with collectives in flight; finalize_backward() ends it (torch 2.15)."""

import pytest
import torch
import trireme

from ddp.ranks import loss_of
from harness.faults import raises
from harness.meeting import say, stay_until
from harness.models import batch, mlp
from harness.on_ranks import on_ranks
from harness.training import gradients


def expected(*steps: int) -> dict[str, torch.Tensor | None]:
    alone = mlp()
    for step in steps:
        alone(batch(step)).square().mean().backward()
    return gradients(alone)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks()
def test_gradients_are_final_after_it(rank: int, set_to_none: bool) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), bucket_cap_mb=0.0003)
    assert not ddp.require_manual_backward_finalization
    assert not ddp.should_finalize_after_backward
    ddp.require_manual_backward_finalization = True
    for step in range(4):
        ddp.zero_grad(set_to_none=set_to_none)
        loss = loss_of(ddp, step, rank)
        assert ddp.should_finalize_after_backward
        loss.backward()
        ddp.finalize_backward()
        torch.testing.assert_close(gradients(ddp), expected(step))


@on_ranks()
def test_backward_returns_before_the_other_rank_has_come(rank: int) -> None:
    """Rank 0's backward is over while rank 1 has not begun its own."""
    ddp = trireme.DistributedDataParallel(mlp())
    ddp.require_manual_backward_finalization = True
    for step in range(3):
        ddp.zero_grad()
        loss = loss_of(ddp, step, rank)
        if rank == 1:
            stay_until(f"rank 0 is through {step}")
        loss.backward()
        if rank == 0:
            say(f"rank 0 is through {step}")
        ddp.finalize_backward()
        torch.testing.assert_close(gradients(ddp), expected(step))


@on_ranks()
def test_accumulation_needs_one_finalization(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    ddp.require_manual_backward_finalization = True
    with ddp.no_sync():
        loss_of(ddp, 0, rank).backward()
        with raises(RuntimeError, "[ddp] got finalize_backward() with no synchronized backward"):
            ddp.finalize_backward()
    loss_of(ddp, 1, rank).backward()
    ddp.finalize_backward()
    torch.testing.assert_close(gradients(ddp), expected(0, 1))


@on_ranks()
def test_wrong_order(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    with raises(RuntimeError, "no synchronized backward", f"(rank {rank} of 2)"):
        ddp.finalize_backward()
    ddp.require_manual_backward_finalization = True
    first, second = loss_of(ddp, 0, rank), loss_of(ddp, 1, rank)
    first.backward()
    with raises(RuntimeError, "forward before finalize_backward()"):
        loss_of(ddp, 2, rank)
    with raises(RuntimeError, "change of manual finalization"):
        ddp.require_manual_backward_finalization = False
    with raises(RuntimeError, "second backward before finalize_backward()"):
        second.backward()
    ddp.finalize_backward()
    with raises(RuntimeError, "no synchronized backward"):
        ddp.finalize_backward()


@on_ranks()
def test_switched_off_again(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    for step, manual in enumerate([True, False, True, False]):
        ddp.require_manual_backward_finalization = manual
        ddp.zero_grad()
        loss_of(ddp, step, rank).backward()
        if manual:
            ddp.finalize_backward()
        torch.testing.assert_close(gradients(ddp), expected(step))


@on_ranks()
def test_with_a_communication_hook(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ddp = trireme.DistributedDataParallel(mlp())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp.require_manual_backward_finalization = True
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp, step, rank).backward()
        ddp.finalize_backward()
        torch.testing.assert_close(gradients(ddp), expected(step))
