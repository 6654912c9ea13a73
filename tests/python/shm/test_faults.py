"""A rank dies, stops, leaves, forks or does not come: who raises what, and when."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, TensorDataset

from harness.deaths import Death, die_when_awaited, run_deaths
from harness.faults import HOUSE_FORM, kill_this_rank, message_of, raises
from harness.meeting import (
    PATIENCE_S,
    is_inside,
    meet_again,
    process_of,
    say,
    set_timeout,
    state_of,
    stay_until,
    until,
    until_inside,
)
from harness.models import batch, mlp
from harness.on_ranks import on_shm_ranks
from harness.ranks import run_ranks
from harness.tensors import assert_bits
from shm.ranks import backend_of, of_all, reduced, values

# --- Late ----------------------------------------------------------------------------------------


@on_shm_ranks(3, timeout=40)
def test_a_rank_that_does_not_come(rank: int) -> None:
    """The timeout that was set last counts, and the error says who, where and in what state."""
    parts = (
        "collective 2, all_reduce of 7 float32 by SUM",
        "rank 1 (process",
        f"(rank {rank} of 3)",
    )
    for asynchronous in (False, True):
        meet_again(f"{asynchronous=}", PATIENCE_S)
        dist.all_reduce(torch.ones(5))
        set_timeout(1)
        if rank == 1:
            stay_until("0 is done", "2 is done")
            with raises(dist.DistBackendError, "the group has failed", "(rank 1 of 3)"):
                dist.all_reduce(torch.ones(7))
            continue
        with raises(dist.DistBackendError, *parts, "has not come within 1 s", "it is alive"):
            work = dist.all_reduce(torch.ones(7), async_op=asynchronous)
            if work is not None:
                work.wait()
        with raises(dist.DistBackendError, "collective 2, all_reduce of 7 float32"):
            dist.barrier()  # nothing works any more, for the reason that was first
        say(f"{rank} is done")


@on_shm_ranks(2, timeout=40)
def test_the_timeout_of_one_call(rank: int) -> None:
    """monitored_barrier has its own; that of the group is 30 s."""
    if rank == 1:
        return stay_until("done")
    with raises(dist.DistBackendError, "barrier: rank 1 (process", "within 1 s; it is alive"):
        dist.group.WORLD.monitored_barrier(timedelta(seconds=1))
    say("done")


@on_shm_ranks(4, timeout=40)
def test_a_monitored_barrier_names_all_that_are_missing(rank: int) -> None:
    dist.all_reduce(torch.ones(5))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    if rank in (1, 3):
        return stay_until("0 is done", "2 is done")
    missing = [f"rank {other} (process" for other in (1, 3)]
    with raises(dist.DistBackendError, *missing, "has not come within 1 s; it is alive"):
        dist.group.WORLD.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
    say(f"{rank} is done")


def name_the_dead(rank: int) -> None:
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        kill_this_rank()
    if rank == 2:
        return stay_until("done")
    missing = ("has died", "; rank 2 (process", "has not come within 1 s")
    with raises(dist.DistBackendError, "rank 1 (process", *missing):
        dist.group.WORLD.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
    say("done")


def test_a_monitored_barrier_waits_behind_a_dead_rank() -> None:
    run_deaths(name_the_dead, 3, [Death(1)])


@on_shm_ranks(2, timeout=40)
def test_a_stopped_rank(rank: int) -> None:
    dist.barrier()
    set_timeout(2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    stopped = process_of(1)
    until(lambda: state_of(stopped) == "T")
    with raises(dist.DistBackendError, "it is alive (stopped) but not progressing"):
        dist.all_reduce(torch.ones(2))
    os.kill(stopped, signal.SIGCONT)


@on_shm_ranks(2)
def test_a_slow_rank_is_waited_for(rank: int) -> None:
    for numel in (2, 1_000_000):
        if rank == 1:
            until_inside(0, f"all_reduce of {numel} float32")
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        assert torch.all(tensor == 2)


# --- Dead and gone -------------------------------------------------------------------------------


def outlive(rank: int, when: str) -> None:
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        if when == "in the middle":
            threading.Thread(target=die_inside, args=("all_reduce of 3000000",)).start()
            while True:
                dist.all_reduce(torch.ones(3_000_000))
        die_when_awaited() if when == "while others wait" else kill_this_rank()
    if when == "before they call":
        until(lambda: state_of(process_of(1)) == "Z")
    parts = ("rank 1 (process", "has died", "all_reduce of 3000000 float32 by SUM")
    with raises(dist.DistBackendError, *parts):
        while True:
            work = dist.all_reduce(torch.ones(3_000_000), async_op=when == "while others wait")
            if work is not None:
                work.wait()


def die_inside(what: str) -> None:
    until(lambda: is_inside(os.getpid(), what))
    kill_this_rank()


def test_a_killed_rank() -> None:
    moments = ("before they call", "while others wait", "in the middle")
    run_deaths(outlive, 3, [Death(1, (moment,)) for moment in moments])


@on_shm_ranks(3, timeout=40)
def test_a_rank_that_leaves(rank: int) -> None:
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    with raises(dist.DistBackendError, "all_reduce of 7 float32", "rank 1", "ended normally"):
        dist.all_reduce(torch.ones(7))


@on_shm_ranks(3, timeout=40)
def test_an_aborted_group(rank: int) -> None:
    """What is in flight and what is called later raises everywhere, naming who aborted."""
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        backend_of().abort()
    for _ in range(2):
        with raises(dist.DistBackendError, "the group was aborted", "(rank 1 of 3)"):
            dist.all_reduce(torch.ones(7))


def leave_without_a_word(rank: int, pending: bool) -> int:
    dist.init_process_group("trireme")
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(5), group=group)
    if pending:  # in flight when the interpreter ends
        begun, ending = threading.Event(), threading.Event()
        for _ in range(10):
            work = dist.all_reduce(torch.ones(100_000), async_op=True)
            work.get_future().then(lambda _: (begun.set(), ending.wait(20)))
        assert begun.wait(20)
        ending.set()
    return os.getpid()


@pytest.mark.parametrize("pending", [False, True])
def test_an_end_without_destroy_process_group(pending: bool) -> None:
    """run_ranks raises if a rank does not end by itself, and well."""
    run_ranks(leave_without_a_word, 2, pending, timeout=40, fresh=True)


ENDS = """
import sys, torch, torch.distributed as dist, trireme
rank = int(sys.argv[1])
dist.init_process_group("trireme", init_method=sys.argv[2], rank=rank, world_size=2)
dist.all_reduce(torch.ones(5))
if rank == 0:
    try:
        dist.all_reduce(torch.ones(7))
    except dist.DistBackendError as error:
        print(error)
elif sys.argv[3] == "error":
    raise ValueError("there is no such file")
elif sys.argv[3] == "exit":
    sys.exit(3)
"""

HOW_IT_ENDED = {
    "well": ("ended normally; ", "Did it have fewer batches, or steps? See join() of DDP"),
    "exit": (
        "has left the group: it ended with exit code 3; ",
        "Look for the error of that rank; ",
    ),
    "error": ("ended by ValueError: there is no such file; ", "Look for the error of that rank; "),
}


@pytest.mark.parametrize("how", HOW_IT_ENDED)
def test_how_a_program_ended_is_told(how: str, tmp_path: Path) -> None:
    """The program has not called destroy_process_group()."""
    command = [sys.executable, "-c", ENDS]
    arguments = [f"file://{tmp_path / 'store'}", how]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), *arguments], **pipes) for rank in range(2)]
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    text = said[0]
    for part in ("rank 1 (process", *HOW_IT_ENDED[how], "last operation: collective 1, all_reduce"):
        assert part in text, text


# --- Forks ---------------------------------------------------------------------------------------


@on_shm_ranks(2, timeout=40)
def test_a_forked_child_cannot_use_the_group(rank: int) -> None:
    """It raises at once; neither that nor how the child ends concerns the parents."""
    dist.all_reduce(torch.ones(5))
    in_flight = dist.all_reduce(torch.ones(5), async_op=True) if rank == 0 else None
    if rank == 0:  # a thread is at it, which the child does not have
        until(lambda: is_inside(os.getpid(), "all_reduce of 5 float32"))
        say("rank 0 is inside")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(5))
            text = "nothing was raised"
        except dist.DistBackendError as error:
            text = message_of(error)
        dist.destroy_process_group()
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    text = os.read(read_end, 4096).decode()
    assert os.waitpid(child, 0)[1] == 0
    if rank == 1:
        stay_until("rank 0 is inside")
        dist.all_reduce(torch.ones(5))
    assert HOUSE_FORM.match(text) and "all_reduce in a forked child" in text, text
    if in_flight is not None:
        in_flight.wait()
    for _ in range(3):
        tensor = values(rank, 9000, torch.float32)
        dist.all_reduce(tensor)
        assert_bits(tensor, reduced(ReduceOp.SUM, of_all(2, 9000, torch.float32)))


@on_shm_ranks(2, timeout=60, fresh=True)  # a DataLoader leaves a signal handler
def test_workers_of_a_data_loader_are_forked(rank: int) -> None:
    """They live and end beside the group, in every epoch anew."""
    data = TensorDataset(torch.stack([batch(step)[rank::2] for step in range(4)]))
    loader = DataLoader(data, batch_size=1, num_workers=2, multiprocessing_context="fork")
    ddp = TorchDDP(mlp())
    plain = mlp()
    for _ in range(2):
        for step, (rows,) in enumerate(loader):
            ddp.zero_grad()
            plain.zero_grad()
            ddp(rows[0]).square().mean().backward()
            plain(batch(step)).square().mean().backward()
            for ours, alone in zip(ddp.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, alone.grad)
