"""How a wait on the backend ``trireme`` ends: by its own timeout, or by a signal."""

import itertools
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from harness.faults import HOUSE_FORM, message_of, raises
from harness.meeting import is_inside, process_of, say, set_timeout, stay_until, store, until
from harness.on_ranks import on_shm_ranks
from harness.ranks import run_ranks
from shm.ranks import backend_of

SHORT = timedelta(milliseconds=50)
PATIENCE = timedelta(seconds=20)


def sent(numel: int = 3) -> torch.Tensor:
    return torch.ones(numel)


# --- Its own timeout -----------------------------------------------------------------------------

STARTS: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda rank: dist.all_reduce(sent(), async_op=True),
    "barrier": lambda rank: dist.barrier(async_op=True),
    "broadcast": lambda rank: dist.broadcast(sent(), 1, async_op=True),
    "recv": lambda rank: dist.irecv(sent(), 1) if rank == 0 else dist.isend(sent(), 0),
    "send": lambda rank: (
        dist.isend(sent(9_000_000), 1) if rank == 0 else dist.irecv(sent(9_000_000), 0)
    ),
}


@on_shm_ranks(2, timeout=100)
def test_a_wait_keeps_its_own_timeout(rank: int) -> None:
    """Rank 1 comes to each operation after rank 0 gave up waiting for it, and nothing is lost."""
    for name, start in STARTS.items():
        if rank == 1:
            stay_until(f"{name}: rank 0 has given up")
        work = start(rank)
        if rank == 0:
            for _ in range(2):
                with raises(dist.DistBackendError, "is not done after a wait of 50 ms", "goes on"):
                    work.wait(SHORT)
            assert not work.is_completed()
            say(f"{name}: rank 0 has given up")
        assert work.wait(PATIENCE) and work.is_completed()
        work.wait()
    tensor = sent()
    dist.all_reduce(tensor)
    assert torch.all(tensor == 2)


@on_shm_ranks(2, timeout=40)
def test_a_wait_for_the_last_of_several(rank: int) -> None:
    """The queue's own thread works off what lies before it; results come in their order."""
    if rank == 1:
        stay_until("rank 0 has given up")
    tensors = [torch.full((5,), float(number)) for number in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if rank == 0:
        with raises(dist.DistBackendError, "operation 4 is not done"):
            works[-1].wait(SHORT)
        say("rank 0 has given up")
    works[-1].wait(PATIENCE)
    assert all(work.is_completed() for work in works)
    assert [tensor[0].item() for tensor in tensors] == [0, 2, 4, 6]


# --- Very long ones ------------------------------------------------------------------------------

VERY_LONG = (timedelta(days=365 * 300), timedelta.max)


@on_shm_ranks(2, timeout=60)
def test_timeouts_of_centuries(rank: int) -> None:
    """They are waited for like others: rank 1 comes late to each operation."""
    for number, very_long in enumerate(VERY_LONG):
        made = dist.new_group(timeout=very_long)
        set_timeout(very_long)
        for name, start in {
            "of a group": lambda made=made: dist.all_reduce(sent(), group=made, async_op=True),
            "set later": lambda: dist.all_reduce(sent(), async_op=True),
            "of a message": lambda: dist.isend(sent(), 0) if rank == 1 else dist.irecv(sent(), 1),
            "of a call": lambda very_long=very_long: backend_of().barrier(
                barrier_within(very_long)
            ),
        }.items():
            if rank == 1:
                stay_until(f"{number} {name}")
            work = start()
            if rank == 0:
                with raises(dist.DistBackendError, "is not done after a wait of 50 ms"):
                    work.wait(SHORT)
                say(f"{number} {name}")
            work.wait(very_long)


def barrier_within(timeout: timedelta) -> Any:
    options = dist.BarrierOptions()
    options.timeout = timeout
    return options


def meet_for_ever(rank: int, timeout: Any) -> None:
    with trireme.init(timeout=timeout):
        tensor = sent()
        dist.all_reduce(tensor)
        assert torch.all(tensor == 2)


@pytest.mark.parametrize("timeout", [float("inf"), timedelta.max, 1e300])
def test_a_run_without_end(timeout: Any) -> None:
    run_ranks(meet_for_ever, 2, timeout, timeout=40)


def zero_step() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A backward and a step of ZeRO, after one of each."""
    torch.manual_seed(0)
    model = trireme.DistributedDataParallel(nn.Linear(40, 40))
    optimizer = trireme.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def backward() -> None:
        model(torch.ones(2, 40)).sum().backward()

    for _ in range(2):
        backward()
        optimizer.step()
    return backward, optimizer.step


@pytest.mark.parametrize("where", ["backward", "step"])
@on_shm_ranks(2, timeout=60)
def test_a_timeout_that_is_set_later(rank: int, where: str) -> None:
    """It reaches what was made before: deposits and gates."""
    backward, step = zero_step()
    if where == "step":
        backward()
    set_timeout(1)
    if rank == 1:
        return stay_until("0 has given up")
    with raises(dist.DistBackendError, "rank 1 (process", "has not come within 1 s"):
        backward() if where == "backward" else step()
    say("0 has given up")


# --- Signals -------------------------------------------------------------------------------------


class Stop(Exception):
    """What a handler raises."""


def signal_once_it_waits(what: str, number: int = signal.SIGUSR2) -> None:
    """To rank 0, of rank 1."""
    pid = process_of(0)
    until(lambda: is_inside(pid, what))
    os.kill(pid, number)


def signal_once_it_sleeps(what: str, number: int) -> None:
    """As signal_once_it_waits, where another thread of rank 0 may be the one that is in it."""
    pid = process_of(0)
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: is_inside(pid, what) and ") S " in stat.read_text())  # S: its first thread sleeps
    os.kill(pid, number)


@contextmanager
def handled(handler: Any, number: int = signal.SIGUSR2) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@on_shm_ranks(2, timeout=100)
def test_signal_handlers_run_while_a_rank_waits(rank: int) -> None:
    """Rank 1 comes only after the handler has run on rank 0."""
    backward, step = zero_step()
    starts: dict[str, tuple[str, Callable[[], Any]]] = {
        "at once": ("all_reduce of 3 float32", lambda: dist.all_reduce(sent())),
        "later": (
            "all_reduce of 4 float32",
            lambda: dist.all_reduce(sent(4), async_op=True).wait(),
        ),
        "on another thread": (
            "all_reduce of 5 float32",
            lambda: dist.all_reduce(sent(5), async_op=True).wait(PATIENCE),
        ),
        "in a backward": ("", backward),
        "in a step": ("step gate", step),
    }
    for name, (what, start) in starts.items():
        if rank == 1:
            stay_until(f"{name}: rank 0 comes")  # rank 0 is not in what was before
            signal_once_it_waits(what)
            stay_until(name)
            start()
        else:
            with handled(lambda *_, name=name: say(name)):
                say(f"{name}: rank 0 comes")
                start()
    dist.barrier()


@on_shm_ranks(2, timeout=60)
def test_a_signal_while_a_message_is_waited_for(rank: int) -> None:
    """What the handler raises comes out; the message goes on."""
    if rank == 1:
        stay_until("rank 0 was called away")
        dist.send(sent(), 0)
        return
    came = queue.SimpleQueue()

    def handler(*_: Any) -> None:
        came.put("one")
        if (number := next(numbers)) == 5:
            raise Stop(number)

    def call() -> None:  # the first of them may come before the wait has begun
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGUSR2)
            came.get(timeout=PATIENCE.total_seconds())

    numbers = itertools.count(1)
    tensor = torch.zeros(3)
    work = dist.irecv(tensor, 1)
    with handled(handler), pytest.raises(Stop):
        thread = threading.Thread(target=call)
        thread.start()
        work.wait()
    thread.join()
    say("rank 0 was called away")
    work.wait()
    assert torch.all(tensor == 1)


def stop(*_: Any) -> None:
    raise Stop("enough")


@pytest.mark.parametrize("asynchronous", [False, True])
@on_shm_ranks(2, timeout=60)
def test_a_handler_that_raises(rank: int, asynchronous: bool) -> None:
    """It leaves the collective; the peer hears by what, and the next step of both works."""
    numel = 3_000_000
    for number, handler, error in (
        (signal.SIGUSR2, stop, Stop),
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
    ):
        dist.barrier()
        if rank == 0:
            with handled(handler, number), pytest.raises(error):
                work = dist.all_reduce(sent(numel), async_op=asynchronous)
                if work is not None:
                    work.wait(PATIENCE)
            say(f"left by {error.__name__}")
        else:
            signal_once_it_sleeps(f"all_reduce of {numel} float32", number)
            stay_until(f"left by {error.__name__}")
            parts = ("rank 0 (process", "has left it", error.__name__, "signal handler")
            with raises(dist.DistBackendError, *parts):
                dist.all_reduce(sent(numel))
        tensor = sent(numel)
        dist.all_reduce(tensor)
        assert torch.all(tensor == 2)


@on_shm_ranks(2, timeout=60)
def test_a_handler_that_calls_a_collective(rank: int) -> None:
    """Nobody could run it: it is refused, and the collective that was interrupted goes on."""
    if rank == 1:
        signal_once_it_waits("all_reduce of 3 float32")
        text = store().get("text").decode()
        assert HOUSE_FORM.match(text) and "from within a signal handler" in text, text
        assert "operation of that group (rank 0 of 2)" in text, text
        dist.all_reduce(sent())
        return

    def collective(*_: Any) -> None:
        try:
            dist.barrier()
        except dist.DistBackendError as error:
            store().set("text", message_of(error))

    tensor = sent()
    with handled(collective):
        dist.all_reduce(tensor)
    assert torch.all(tensor == 2)


@on_shm_ranks(2, timeout=60)
def test_a_signal_while_a_group_ends(rank: int) -> None:
    """What is queued is given up, and the handler's exception comes out."""
    made = dist.new_group()
    if rank == 1:
        signal_once_it_waits("all_reduce of 6 float32")
        stay_until("rank 0 has stopped")
        return
    with handled(stop), pytest.raises(Stop):
        dist.all_reduce(sent(6), group=made, async_op=True)
        dist.destroy_process_group(made)
    say("rank 0 has stopped")
