"""The c10d backend ``trireme``: collectives of CPU ranks through the memory of their host."""

from __future__ import annotations

import os
import sys
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from trireme import _C

SHM = "trireme"

_leaver = 0
"""The process that says farewell when it ends."""


def register() -> None:
    """Make ``init_process_group("trireme")`` work; torch's entry point, and ``import trireme``."""
    if not hasattr(dist.Backend, SHM.upper()):
        dist.Backend.register_backend(SHM, _create, extended_api=True, devices=["cpu"])


def _leave() -> None:
    """Does what is left to do where nobody has called ``destroy_process_group()``."""
    _C.close_all_p2p()
    error = _error_at_the_end()
    _C.leave_all_groups("" if error is None else f"{type(error).__name__}: {error}")


def _error_at_the_end() -> BaseException | None:
    # That of a process of multiprocessing is still on its way; else it is what the interpreter
    # showed last, which in a script is what ended it.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return (error.__context__ or error) if error.code else None
    return error


def _create(options: Any, backend_options: Any) -> Any:
    global _leaver
    if _leaver != os.getpid():  # not the process that this one was forked from
        _leaver = os.getpid()
        # It runs at the end of a program, or of a process of multiprocessing, which has no atexit.
        Finalize(None, _leave, exitpriority=0)
    partition = getattr(backend_options, "host_partition", "")  # of tests
    return _C.make_shm_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        host_partition=partition,
    )
