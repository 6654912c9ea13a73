"""What goes wrong where the ranks of the backend ``trireme`` are on several hosts."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch.distributed import ReduceOp

from ddp.ranks import (
    HOUSE_FORM,
    batch,
    message_of,
    mlp,
    process_of,
    raises,
    say,
    set_timeout,
    stay_until,
)
from distributed import run_ranks
from shm.hosts import LAYOUTS, SOME_LAYOUTS, join, on_hosts, until_entered
from shm.ranks import backend_of, state_of, until


def mismatches(rank: int, world: int) -> None:
    """On one host, between hosts, on all: everybody raises, and the group goes on."""
    dist.barrier()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: dist.all_reduce(torch.ones(5 + (rank == world - 1))), "all_reduce of 6 float32"),
        (lambda: dist.all_reduce(torch.ones(5 + (rank == 0))), "all_reduce of 6 float32"),
        (
            lambda: dist.barrier() if rank == 0 else dist.broadcast(torch.ones(3), 1),
            "broadcast of 3 float32 with root 1",
        ),
        (lambda: dist.all_reduce(torch.ones(3), ReduceOp.BOR), "bits are combined of integers"),
    ]
    for call, part in cases:
        with raises(dist.DistBackendError, part):
            call()
        tensor = torch.ones(2000)
        dist.all_reduce(tensor)
        assert torch.all(tensor == world)


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_ranks_that_do_not_agree(layout: str) -> None:
    on_hosts(layout, mismatches)


def die_after(event: threading.Event) -> None:
    event.wait(20)
    os.kill(os.getpid(), signal.SIGKILL)


def survive(rank: int, layout: str, victim: int, when: str) -> str | None:
    join(rank, layout)
    dist.all_reduce(torch.ones(5))
    what = "all_reduce of 3000000"
    if rank == victim:
        if when == "in the middle":
            has_begun = threading.Event()
            threading.Thread(target=die_after, args=(has_begun,)).start()
            while True:
                dist.all_reduce(torch.ones(3_000_000))
                has_begun.set()
        if when == "while others wait":
            until_entered({*range(len(LAYOUTS[layout]))} - {rank}, what)
        os.kill(os.getpid(), signal.SIGKILL)
    say(f"{rank} comes")
    if when == "before they call":
        until(lambda: state_of(process_of(victim)) == "Z")
    try:
        while True:
            dist.all_reduce(torch.ones(3_000_000))
    except dist.DistBackendError as error:
        with raises(dist.DistBackendError):
            dist.barrier()  # nothing works any more
        return message_of(error)


@pytest.mark.parametrize("when", ["before they call", "while others wait", "in the middle"])
@pytest.mark.parametrize(
    ("layout", "victim"), [("2x2", 3), ("2x2", 0), ("1+3", 0), ("1+3", 1), ("1+3", 3)]
)
def test_a_killed_rank(layout: str, victim: int, when: str) -> None:
    world = len(LAYOUTS[layout])
    texts = run_ranks(survive, world, layout, victim, when, timeout=60, dying=(victim,))
    for rank in set(range(world)) - {victim}:
        text = texts[rank]
        assert HOUSE_FORM.match(text), text
        assert f"rank {victim}" in text, text
        assert "all_reduce of 3000000 float32" in text, text
        # Those that shared its memory saw it die; so did, by their word, most of the others.
        if LAYOUTS[layout][rank] == LAYOUTS[layout][victim]:
            assert "has died" in text, text


def late(rank: int, layout: str) -> str | None:
    join(rank, layout)
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        stay_until("0 is done", "2 is done", "3 is done")
        with raises(dist.DistBackendError, "the group has failed"):
            dist.barrier()
        return None
    set_timeout(1.5)
    text = ""
    try:
        dist.all_reduce(torch.ones(7))
    except dist.DistBackendError as error:
        text = message_of(error)
    say(f"{rank} is done")
    return text


def test_a_rank_that_does_not_come() -> None:
    """The host that it is missing from says so; the others quote it."""
    texts = run_ranks(late, 4, "2x2", timeout=60)
    for rank in (0, 2, 3):
        for part in ("rank 1 (process", "has not come within 1500 ms", "it is alive"):
            assert part in texts[rank], texts[rank]


def aborted(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        until_entered((0, 2, 3), "all_reduce of 7")
        backend_of().abort()
    say(f"{rank} comes")
    with raises(dist.DistBackendError, "the group was aborted (rank 1 of 4)"):
        dist.all_reduce(torch.ones(7))


@pytest.mark.parametrize("layout", ["2x2", "1+3"])
def test_an_aborted_group(layout: str) -> None:
    on_hosts(layout, aborted)


def abandon(rank: int, world: int) -> None:
    """An exception in one rank's backward, while the others are in its collectives."""
    model = trireme.DistributedDataParallel(mlp())
    loss = model(batch(0)).square().mean()
    if rank == 1:
        model.module[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        return
    with raises(dist.DistBackendError, "was abandoned", "(rank 1 of 4)"):
        loss.backward()


def test_a_backward_of_ddp_that_raises_on_one_rank() -> None:
    on_hosts("2x2", abandon)


def fork_and_go_on(rank: int, world: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(5))
        except dist.DistBackendError as error:
            os._exit(0 if "forked child" in message_of(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()


def test_a_forked_child_cannot_use_the_group() -> None:
    on_hosts("2x2", fork_and_go_on)


def wait_for_another_host(rank: int, world: int) -> None:
    dist.barrier()
    if rank >= 2:  # busy, until the others have raised
        stay_until("0 raised", "1 raised")

    def abort() -> None:
        until_entered((0, 1), "broadcast of 7")
        backend_of().abort()

    say(f"{rank} comes")
    if rank == 1:
        threading.Thread(target=abort).start()
    with raises(dist.DistBackendError, "the group was aborted (rank 1 of 4)"):
        dist.broadcast(torch.ones(7), 3)
    say(f"{rank} raised")


def test_a_rank_that_waits_for_another_host_hears_of_its_own() -> None:
    on_hosts("2x2", wait_for_another_host)
