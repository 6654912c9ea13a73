"""What a rank tells its peers when its process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize

from trireme import _C

_leaver = 0
"""The process that says farewell when it ends."""

_callbacks: list[Callable[[str], None]] = []


def call_at_the_end(callback: Callable[[str], None]) -> None:
    """Calls ``callback`` before peers are told, with the error that ends this process, or ""."""
    say_farewell_at_the_end()
    if callback not in _callbacks:
        _callbacks.append(callback)


def say_farewell_at_the_end() -> None:
    """Makes this process tell the peers of its groups, when it ends, by which error it does."""
    global _leaver
    if _leaver != os.getpid():  # not the process that this one was forked from
        _leaver = os.getpid()
        # It runs at the end of a program, or of a process of multiprocessing, which has no atexit.
        Finalize(None, _leave, exitpriority=0)


def failure_of(error: BaseException | None) -> str:
    """Returns what peers are told of what ends this rank: "" where that is no failure, as
    ``sys.exit()`` is none."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    return f"{type(error).__name__}: {error}"


def _leave() -> None:
    """Does what is left to do where nobody has called ``destroy_process_group()``."""
    text = failure_of(_error_at_the_end())
    try:
        for callback in _callbacks:
            callback(text)
    finally:
        _C.close_all_p2p()
        _C.leave_all_groups(text)


def _error_at_the_end() -> BaseException | None:
    # In a process of multiprocessing the error is still on its way; else it is what the
    # interpreter showed last, which in a script is what ended it.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and failure_of(error):
        return error.__context__ or error
    return error
