"""A process is interrupted, runs out of memory, holds its interpreter, dies and is replaced."""

import ctypes
import os
import resource
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from harness.faults import HOUSE_FORM, message_of, raises
from harness.leftovers import files_in_memory, left_in_memory
from harness.meeting import (
    is_inside,
    process_of,
    say,
    set_timeout,
    stay_until,
    tell_process,
    until,
    until_inside,
)
from harness.memory import mapped_bytes
from harness.on_ranks import AGES_S, on_shm_ranks
from harness.ranks import run_ranks
from harness.tensors import assert_bits
from shm.ranks import of_all, reduced, values


def hold_the_interpreter(until: Path) -> None:
    """No other thread of Python runs before something is written into that FIFO."""
    file = os.open(until, os.O_RDWR)
    ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)
    os.close(file)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


# --- The interpreter's lock -----------------------------------------------------------------------


@on_shm_ranks(3, timeout=40)
def test_a_rank_that_holds_the_interpreter_and_does_not_come(rank: int, fifo: Path) -> None:
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        hold_the_interpreter(until=fifo)
        with raises(dist.DistBackendError, "the group has failed"):
            dist.all_reduce(torch.ones(7))
        return
    set_timeout(1)
    with raises(dist.DistBackendError, "rank 1 (process", "is alive (", "but not progressing"):
        dist.all_reduce(torch.ones(7))
    say(f"{rank} has raised")
    if rank == 0:
        stay_until("2 has raised")
        fifo.write_text("go on")


@on_shm_ranks(2, timeout=40)
def test_what_is_in_flight_needs_no_interpreter(rank: int, fifo: Path) -> None:
    dist.all_reduce(torch.ones(5))
    tensor = torch.ones(1_000_000)
    if rank == 1:
        work = dist.all_reduce(tensor, async_op=True)
        hold_the_interpreter(until=fifo)
        work.wait()
    else:
        dist.all_reduce(tensor)
        fifo.write_text("go on")
    assert torch.all(tensor == 2)


@on_shm_ranks(2, timeout=40)
def test_who_waits_lets_other_threads_of_python_run(rank: int) -> None:
    if rank == 1:
        stay_until("rank 0 ticks")
        dist.all_reduce(torch.ones(7))
        return

    def tick() -> None:
        until(lambda: is_inside(os.getpid(), "all_reduce of 7 float32"))
        say("rank 0 ticks")

    thread = threading.Thread(target=tick)
    thread.start()
    dist.all_reduce(torch.ones(7))
    thread.join()


# --- Signals --------------------------------------------------------------------------------------


def interrupted(rank: int, waits: bool) -> None:
    """Both ranks get what Ctrl-C sends, once each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("trireme")
    tell_process(rank)
    dist.all_reduce(torch.ones(5))
    has_begun = threading.Event()

    def press() -> None:
        if waits:
            until_inside(0, "all_reduce of 1000 float32")
            os.kill(process_of(0), signal.SIGINT)
        assert has_begun.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    if not waits or rank == 1:
        threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        try:
            while not (waits and rank == 1):
                dist.all_reduce(torch.ones(1000))
                has_begun.set()
        except dist.DistBackendError as error:  # the peer was first
            assert "rank" in message_of(error)
        has_begun.set()
        threading.Event().wait(20)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dist.destroy_process_group()


@pytest.mark.parametrize("waits", [False, True])
def test_control_c(waits: bool) -> None:
    """Nobody stays in a collective that its peers have been interrupted out of."""
    run_ranks(interrupted, 2, waits, timeout=60, fresh=True)


# --- Memory ---------------------------------------------------------------------------------------


@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_no_room_for_the_rings(rank: int) -> None:
    """All ranks raise, with numbers; when there is room the next call works."""
    dist.barrier()  # it moves nothing, and so needs none
    if rank == 1:
        room = mapped_bytes() + (2 << 20)  # less than a ring, enough for what Python needs
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    with raises(dist.DistBackendError, "got no memory", "rank 1 says: ", "bytes", "free are "):
        dist.all_reduce(torch.ones(7))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tensor = values(rank, 9000, torch.float32)
    dist.all_reduce(tensor)
    assert_bits(tensor, reduced(ReduceOp.SUM, of_all(2, 9000, torch.float32)))


def die(rank: int) -> None:
    dist.init_process_group("trireme")
    dist.all_reduce(torch.ones(100_000))
    dist.send(torch.ones(3), 1 - rank)  # messages have memory of their own
    os.kill(os.getpid(), signal.SIGKILL)


def sums(rank: int, world: int) -> list[float]:
    dist.init_process_group("trireme")
    found = []
    for step in range(50):
        tensor = torch.full((1000,), float(rank + step))
        dist.all_reduce(tensor)
        assert torch.all(tensor == tensor[0])
        found.append(tensor[0].item())
    dist.destroy_process_group()
    return found


def test_killed_jobs_leave_nothing_and_disturb_nobody() -> None:
    before = files_in_memory()
    run_ranks(die, 2, timeout=40, dying=(0, 1))
    assert not left_in_memory(before)
    assert run_ranks(sums, 2, 2, timeout=40)[0][0] == 1


def test_two_jobs_at_once() -> None:
    with ThreadPoolExecutor(2) as jobs:
        started = [jobs.submit(run_ranks, sums, world, world, timeout=50) for world in (2, 3)]
        for world, job in zip((2, 3), started, strict=True):
            expected = [sum(range(world)) + world * step for step in range(50)]
            assert job.result() == [expected] * world


# --- Process numbers ------------------------------------------------------------------------------


def meet_a_stranger(rank: int) -> str | None:
    """Rank 1 dies and another process gets its number."""
    dist.init_process_group("trireme")
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        tell_process(1)
        os.kill(os.getpid(), signal.SIGKILL)
    dead = process_of(1)
    until(lambda: not Path(f"/proc/{dead}").exists())
    for _ in range(20):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(dead - 1))
        except OSError:
            return None
        stranger = subprocess.Popen(["sleep", "30"])
        try:
            if stranger.pid == dead:
                try:
                    dist.all_reduce(torch.ones(5))
                except dist.DistBackendError as error:
                    return message_of(error)
                raise AssertionError("a stranger took part")
        finally:
            stranger.kill()
            stranger.wait()
    return None


def test_a_process_number_that_is_used_again() -> None:
    text = run_ranks(meet_a_stranger, 2, timeout=60, dying=(1,))[0]
    if text is None:
        pytest.skip("the number of the next process cannot be chosen here")
    assert HOUSE_FORM.match(text), text
    assert "rank 1 (process" in text and "has died" in text, text
