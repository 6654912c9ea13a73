"""What is counted goes down again: files of results that are kept, threads, what is freed late."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from trireme import remote

from harness.meeting import PATIENCE_S, until
from harness.on_ranks import on_shm_ranks
from remote.functions import add, echo, gate, open_gate
from remote.objects import Counter, until_alive
from remote.ranks import on_remote_ranks, raised, refused

LARGE = 50_000  # so many numbers are lent, not copied
files: list[int] = []
held: list[Tensor] = []


@remote.function
def numbers(first: int) -> Tensor:
    return torch.arange(first, first + LARGE, dtype=torch.float32)


@remote.function
def hold(tensor: Tensor) -> None:
    held.append(tensor)


@remote.function
def release() -> None:
    held.clear()


@remote.function
def count_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@remote.function
def take_files() -> None:
    """Opens as many files as this process may, which are not many from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count_files() + 20, hard))
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))


@remote.function
def allow_no_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))


@remote.function
def give_files_back() -> None:
    while files:
        os.close(files.pop())


@remote.function
def complain(length: int) -> None:
    raise ValueError("no " * length)


@remote.function
def deepest(to: str, depth: int = 0) -> int:
    """Calls itself without end; returns how deep that went."""
    try:
        return remote.call(to, deepest, to, depth + 1)
    except RuntimeError as error:
        assert "hundreds of calls wait for each other" in str(error)
        return depth


@remote.function
def count_threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            count += (task / "comm").read_text().strip() == "trireme-remote"
    return count


class Stubborn(remote.Object):
    """Its end waits for the gate."""

    def __del__(self) -> None:
        gate.wait(PATIENCE_S)


@on_remote_ranks(2)
def test_results_that_a_caller_keeps_take_few_files_of_its_callee(rank: int) -> None:
    if rank == 1:
        return
    before = remote.call("p1", count_files)
    kept = [remote.call("p1", numbers, first) for first in range(300)]
    assert remote.call("p1", count_files) - before < 100
    given = [remote.call("p1", echo, result) for result in kept[:100]]
    for results in (kept, given):
        assert [int(result[0]) for result in results] == list(range(len(results)))
        assert all(int(result[-1] - result[0]) == LARGE - 1 for result in results)
    kept[299].add_(1)  # it may be written, and is nobody else's
    assert kept[298][1] == kept[299][0] - 1


@on_remote_ranks(2, fresh=True)
def test_a_callee_without_files_says_so_and_answers_what_is_small(rank: int) -> None:
    if rank == 1:
        return
    remote.call("p1", take_files)
    kept = []
    with raised(dist.DistBackendError, "Too many open files", "limit", "function numbers at p1"):
        for first in range(40):
            kept.append(remote.call("p1", numbers, first))
    assert len(kept) < 40  # there may have been slots
    assert remote.call("p1", add, 1, 2) == 3
    pending = [remote.call_async("p1", add, number, 1) for number in range(50)]
    assert [call.wait() for call in pending] == list(range(1, 51))
    for length in (1, 3000, 30_000):
        with raised(ValueError, "no no " if length > 1 else "no", "function complain at p1"):
            remote.call("p1", complain, length)
    kept.clear()
    gc.collect()
    assert remote.call("p1", numbers, 3)[0] == 3  # their slots are free
    remote.call("p1", give_files_back)
    kept = [remote.call("p1", numbers, first) for first in range(10)]
    assert len(kept) == 10


@on_shm_ranks(2, fresh=True)
def test_where_not_even_the_spare_file_may_be_opened_both_ranks_are_told(rank: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    remote.start(f"p{rank}")
    unseen = ("rank 1 says: ", "cannot see what rank 0 sends", "Too many open files")
    if rank == 0:
        remote.call("p1", allow_no_files)
        with refused(dist.DistBackendError, "function hold at p1 (rank 1)", *unseen):
            remote.call("p1", hold, torch.ones(3 * LARGE))
    with refused(dist.DistBackendError, "before all ranks have called stop()", *unseen):
        remote.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@on_remote_ranks(2, fresh=True)
def test_a_caller_without_files_hears_its_callee(rank: int) -> None:
    if rank == 1:
        return
    take_files()
    kept = [remote.call("p1", numbers, first) for first in range(20)]
    assert [int(result[0]) for result in kept] == list(range(20))
    with refused(dist.DistBackendError, "Too many open files", "function hold at p1 (rank 1)"):
        for _ in range(40):  # there may be slots
            remote.call("p1", hold, torch.ones(3 * LARGE))
    assert remote.call("p1", add, 1, 2) == 3
    remote.call("p1", release)
    give_files_back()
    assert remote.call("p1", echo, torch.ones(3 * LARGE)).all()


@on_remote_ranks(2, timeout=100)
def test_calls_go_on_after_a_circle_of_calls(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p0", "p1"):
        for _ in range(2):
            assert 500 < remote.call(to, deepest, to) < 530
            assert remote.call(to, add, 1, 2) == 3
        until(lambda to=to: remote.call(to, count_threads) <= 5)


@on_remote_ranks(2)
def test_an_object_whose_end_waits_holds_up_no_other(rank: int) -> None:
    if rank == 1:
        return
    stubborn = [remote.create("p1", Stubborn) for _ in range(3)]
    others = [remote.create("p1", Counter) for _ in range(3)]
    until_alive("p1", 3)
    while stubborn:
        del stubborn[-1], others[-1]
    until_alive("p1", 0)
    remote.call("p1", open_gate)
