"""Threads that Python makes for a WorkerPool, so that Python code may run on them."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

from trireme._C import WorkerPool

# What ends each thread: a graph may keep its pool when nothing of Python's does.
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)
_JOIN_SECONDS = 5.0


def start_threads(pool: WorkerPool, count: int, name: str) -> list[int]:
    """Starts the pool's threads, which end with it. Returns their idents."""
    idents = []
    for worker in range(count):
        thread = threading.Thread(
            target=pool.worker_loop(worker), name=f"{name}-{worker}", daemon=True
        )
        thread.start()
        assert thread.ident is not None
        idents.append(thread.ident)
        _stops[thread] = pool.stopper()
    return idents


@atexit.register
def _close_all() -> None:
    """Threads of an interpreter that ends must not be found in C++ code."""
    ending = [(thread, stop) for thread, stop in list(_stops.items()) if thread.is_alive()]
    for _, stop in ending:
        stop()
    for thread, _ in ending:
        thread.join(_JOIN_SECONDS)
