"""The endpoint of this process: there is one at a time."""

from __future__ import annotations

import math
import numbers
import os
import threading
from typing import Any

import torch.distributed as dist

from trireme._C import RemoteEndpoint
from trireme._core.farewell import call_at_the_end
from trireme._core.group_communicator import communicator_of
from trireme.remote import errors  # noqa: F401, it says how exceptions travel
from trireme.remote.areas import AREA

__all__ = ["names", "start", "stop"]


class _Running:
    """What there is between start() and stop()."""

    def __init__(self, core: RemoteEndpoint) -> None:
        self.core = core
        self.process = os.getpid()


_running: _Running | None = None
_is_over = False
_starting = threading.RLock()
"""Held while start() runs: other ranks may call this one before it has ended here.

Reentrant, so that a call by the thread that starts is refused and does not wait for itself.
"""


def _forget_start() -> None:
    """In a forked child, whose parent may have been in start()."""
    global _starting
    _starting = threading.RLock()


os.register_at_fork(after_in_child=_forget_start)


def start(name: str, *, group: dist.ProcessGroup | None = None, threads: int = 4) -> None:
    """Lets this process call the others of ``group``, and be called by them.

    Collective, once per process until :func:`stop`: when it returns, all ranks can be called.
    Functions and classes are defined before it; those that several ranks have defined are compared.
    Costs a process group of its own, ``threads`` + 2 threads, and 38 KiB of shared memory for each
    pair of ranks of a host.

    Args:
        name: what others call this process; not empty, and no other rank's.
        group: the default group if there is none.
        threads: so many calls are served at one time. A call that waits for another one does not
            count meanwhile.

    Raises:
        ValueError: on all ranks alike: two equal names, an empty name, fewer than one thread, a
            definition that differs, or one that was made twice.
        RuntimeError: this process has started already.
        DistBackendError: a rank is gone.
    """
    global _running, _is_over
    AREA.expect("name", name, str, "a str", next_step="Pass a name of this process.")
    AREA.expect("threads", threads, int, "an int", next_step="Pass how many calls run at one time.")
    with _starting:
        if _running is not None and _running.process == os.getpid():
            AREA.refuse("got a second start()", "Call stop() before it.", kind=RuntimeError)
        given = AREA.expect_group(group, "Call start() on the ranks of the group only.")
        core = RemoteEndpoint(communicator_of(given), name, threads)
        call_at_the_end(_abandon)
        _running, _is_over = _Running(core), False


def stop() -> None:
    """Serves on until all ranks that are still there have called it, and ends.

    Collective. Waits as long as others call; afterwards every call raises RuntimeError. Objects
    that others had Refs to are let go of.

    Raises:
        DistBackendError: some have not come, and were silent for as long as the group's timeout
            says; their names are in the text. Or no message passes between ranks that are there,
            say since one may open no file; the text says why.
    """
    global _running, _is_over
    core = running()
    try:
        core.stop()
    finally:
        _running, _is_over = None, True


def names() -> list[str]:
    """Returns the names of all ranks, by rank."""
    return running().names()


def running() -> RemoteEndpoint:
    """Returns the endpoint, for calls. Waits for a start() of another thread.

    Raises:
        RuntimeError: there is none, or this is a forked child.
    """
    found = _running
    if found is None or found.process != os.getpid():  # a forked child may start, too
        with _starting:
            found = _running
    if found is None:
        if _is_over:
            AREA.refuse("got a call after stop()", "Call start() again.", kind=RuntimeError)
        AREA.refuse("got a call before start()", "Call start() first.", kind=RuntimeError)
    if found.process != os.getpid():
        got = "got a call in a forked child"
        AREA.refuse(got, "Call in the parent only.", kind=RuntimeError)
    return found.core


def expect_name(to: object) -> None:
    """Refuses a callee that is no name, such as a rank."""
    next_step = "Pass one of remote.names()."
    AREA.expect("to", to, str, "the name of a process", next_step=next_step)


def seconds_of(timeout: object) -> float | None:
    """Returns a timeout in seconds, None for none. Any real number is one, numpy's too.

    Raises:
        TypeError, ValueError: it is no number; it is not above zero.
    """
    if timeout is None:
        return None
    next_step = "Pass seconds, or leave it out."
    AREA.expect("timeout", timeout, numbers.Real, "seconds", next_step=next_step)
    number: Any = timeout
    try:
        seconds = float(number)
    except OverflowError:  # no float is as large
        seconds = math.inf if number > 0 else -math.inf
    if math.isnan(seconds) or seconds <= 0:
        AREA.refuse(f"got timeout={timeout}, expected seconds above zero", next_step)
    return seconds


def _abandon(error: str) -> None:
    """Ends without the others, at the end of the process."""
    if _running is not None and _running.process == os.getpid():
        _running.core.abandon(error or "its process has ended")
