"""Ranks that die with a fragment on its way, and exceptions in a step: named on all ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import trireme
from torch.optim import SGD

from harness.deaths import Death, assert_seen_soon, die, run_deaths
from harness.faults import HOUSE_FORM, message_of, raises
from harness.meeting import say, stay_until
from harness.models import mlp
from harness.on_ranks import on_ranks


def outlive(rank: int) -> None:
    """The fragment leaves after step 1 and is awaited after step 2; parameters stay as step 2 has
    left them."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    rounds = trireme.DiLoCo(
        model, optimizer, sync_every=2, fragment_sync_delay=1, across=dist.group.WORLD
    )
    stepped = []
    optimizer.register_step_post_hook(
        lambda *_: stepped.append([param.detach().clone() for param in model.parameters()])
    )
    with raises(dist.DistBackendError, "rank 1"), rounds:
        for step in range(2):
            model(torch.ones(2, 6)).sum().backward()
            if step == 0 and rank == 1:
                stay_until("0 has sent")
                die()
            optimizer.step()
            if step == 0:
                say(f"{rank} has sent")
    assert_seen_soon()
    for now, then in zip(model.parameters(), stepped[-1], strict=True):
        assert torch.equal(now, then)


def test_a_killed_rank() -> None:
    run_deaths(outlive, 2, [Death(1)])


def test_a_killed_rank_over_gloo() -> None:
    run_deaths(outlive, 2, [Death(1)], "gloo")


@on_ranks(backend="trireme")
def test_an_exception_in_a_step(rank: int) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    rounds = trireme.LocalSGD(model, optimizer, sync_every=2, across=dist.group.WORLD)
    began = time.monotonic()
    try:
        with rounds:
            optimizer.step()
            if rank == 1:
                raise ArithmeticError("the data of this rank are broken")
            optimizer.step()
    except ArithmeticError:
        assert rank == 1
    except dist.DistBackendError as error:
        text = message_of(error)
        assert rank == 0 and HOUSE_FORM.match(text), text
        assert "round 0 was abandoned: ArithmeticError: the data" in text, text
    else:
        raise AssertionError("nothing was raised")
    assert time.monotonic() - began < 10
    with raises(RuntimeError, "rounds that have failed"):
        rounds.__enter__()
    optimizer.step()  # after the block it is the optimizer's own
