"""What goes wrong where the ranks of the backend ``trireme`` are on several hosts."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from harness.deaths import Death, run_deaths
from harness.faults import kill_this_rank, message_of, raises
from harness.meeting import process_of, say, set_timeout, state_of, stay_until, until
from harness.pretended_hosts import LAYOUTS, SOME_LAYOUTS, on_hosts, until_entered
from shm.ranks import backend_of


def mismatches(rank: int, world: int) -> None:
    """On one host, between hosts, on all: everybody raises, and the group goes on."""
    dist.barrier()
    odd = rank == 0
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: dist.all_reduce(torch.ones(5 + (rank == world - 1))), "all_reduce of 6 float32"),
        (lambda: dist.all_reduce(torch.ones(5 + odd)), "all_reduce of 6 float32"),
        (
            lambda: dist.barrier() if rank == 0 else dist.broadcast(torch.ones(3), 1),
            "broadcast of 3 float32 with root 1",
        ),
        (
            lambda: dist.group.WORLD.allreduce_coalesced(
                [torch.ones(2 + odd), torch.ones(3 - odd)], dist.AllreduceCoalescedOptions()
            ).wait(),
            " other shapes",
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
    kill_this_rank()


def outlive(rank: int, layout: str, victim: int, when: str) -> None:
    """Who shares the memory of the dead saw it; so did, by its word, most of the others."""
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
        kill_this_rank()
    say(f"{rank} comes")
    if when == "before they call":
        until(lambda: state_of(process_of(victim)) == "Z")
    saw_it = LAYOUTS[layout][rank] == LAYOUTS[layout][victim]
    parts = (f"rank {victim}", "all_reduce of 3000000 float32", "has died" if saw_it else "")
    with raises(dist.DistBackendError, *parts):
        while True:
            dist.all_reduce(torch.ones(3_000_000))
    with raises(dist.DistBackendError):
        dist.barrier()  # nothing works any more


@pytest.mark.parametrize(("layout", "victims"), [("2x2", (3, 0)), ("1+3", (0, 1, 3))])
def test_a_killed_rank(layout: str, victims: tuple[int, ...]) -> None:
    moments = ("before they call", "while others wait", "in the middle")
    deaths = [
        Death(victim, (layout, victim, moment), LAYOUTS[layout])
        for victim in victims
        for moment in moments
    ]
    run_deaths(outlive, len(LAYOUTS[layout]), deaths, timeout=100)


def late(rank: int, world: int) -> None:
    """The host that it is missing from says so; the others quote it."""
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        stay_until("0 is done", "2 is done", "3 is done")
        with raises(dist.DistBackendError, "the group has failed"):
            dist.barrier()
        return
    set_timeout(1.5)
    parts = ("rank 1 (process", "has not come within 1500 ms", "it is alive")
    with raises(dist.DistBackendError, *parts):
        dist.all_reduce(torch.ones(7))
    say(f"{rank} is done")


def test_a_rank_that_does_not_come() -> None:
    on_hosts("2x2", late)


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
