"""The threads of DataParallel's replicas: Python's own, so that Python code may run on them."""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from trireme import _C

T = TypeVar("T")

# What ends each thread: a graph may keep its pool when nothing of Python's does.
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)
_JOIN_SECONDS = 5.0


class _Stopped(BaseException):
    """Raised in a replica because another one has failed."""


class ReplicaThreads:
    """One thread per replica, for as long as this object, or a graph of the replicas, lives.

    `intra_op_threads`: what each computes with; the caller's number stays as it is.
    """

    def __init__(self, devices: Sequence[torch.device], intra_op_threads: Sequence[int]) -> None:
        self.pool = _C.WorkerPool(devices=list(devices), intra_op_threads=list(intra_op_threads))
        self.process = os.getpid()
        self.turn = threading.Lock()  # of who uses the replicas
        self._idents: list[int] = [0] * len(devices)
        self._busy = [False] * len(devices)
        self._sent: set[int] = set()  # replicas that were told to stop, and have not heard it
        self._lock = threading.Lock()
        for replica in range(len(devices)):
            thread = threading.Thread(
                target=self.pool.seat(replica), name=f"trireme-replica-{replica}", daemon=True
            )
            thread.start()
            assert thread.ident is not None
            self._idents[replica] = thread.ident
            _stops[thread] = self.pool.stopper()

    def run(
        self,
        replicas: Sequence[int],
        function: Callable[[int], T],
        wait: Callable[[Callable[[int], None], Callable[[], None]], None],
        names: Callable[[int], str],
    ) -> list[T]:
        """Returns results of `function(position)` for each of `replicas`, run at the same time.

        `wait(job, on_interrupt)` has the threads call `job(position)` and returns when all are
        back. The first exception in order of replicas is raised, with its traceback and a note
        that says whose it is (`names`); it stops the others at their next line of Python, as does
        Ctrl-C.
        """
        results: list[Any] = [None] * len(replicas)
        errors: list[BaseException | None] = [None] * len(replicas)
        contexts = [contextvars.copy_context() for _ in replicas]

        def call(position: int) -> None:
            replica = replicas[position]
            try:
                self._set_busy(replica, True)
                results[position] = contexts[position].run(function, position)
            except _Stopped:
                raise
            except BaseException as error:
                errors[position] = error
                self._set_busy(replica, False)
                self._stop_busy()

        def job(position: int) -> None:
            replica = replicas[position]
            try:
                if all(error is None for error in errors):
                    call(position)
                self._set_busy(replica, False)
                while replica in self._sent:
                    pass  # it is raised at one of these lines, and not in the next job
            except _Stopped as stop:
                self._set_busy(replica, False)
                self._sent.discard(replica)
                errors[position] = errors[position] or stop

        self._sent.clear()
        wait(job, self._stop_busy)
        for position, error in enumerate(errors):
            if error is not None and not isinstance(error, _Stopped):
                errors.clear()  # whose tracebacks hold this frame
                raise _named(error, names(replicas[position]))
        return results

    def _set_busy(self, replica: int, busy: bool) -> None:
        with self._lock:
            self._busy[replica] = busy

    def _stop_busy(self) -> None:
        with self._lock:
            for replica, busy in enumerate(self._busy):
                if busy:
                    self._busy[replica] = False  # once is enough
                    self._sent.add(replica)
                    _raise_in(self._idents[replica], _Stopped)


def run_in_threads(devices: Sequence[torch.device], function: Callable[[int], T]) -> list[T]:
    """Returns results of `function(i)` for each device, at the same time, each in a thread of its
    own.

    With the caller's grad mode, autocast and streams; exceptions as in `ReplicaThreads.run`. Costs
    a start of threads.
    """
    threads = ReplicaThreads(
        devices, [max(1, torch.get_num_threads() // len(devices))] * len(devices)
    )
    everyone = list(range(len(devices)))
    return threads.run(
        everyone,
        function,
        lambda job, on_interrupt: threads.pool.run(everyone, job, on_interrupt),
        lambda replica: f"replica {replica} of {len(devices)} ({devices[replica]})",
    )


def _raise_in(ident: int, kind: type[BaseException]) -> None:
    """Raises at the next line of Python there. Nothing takes it back: CPython 3.11 would hang in a
    profiler."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def _named(error: BaseException, name: str) -> BaseException:
    text = f"[data_parallel] in the forward of {name}"
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
    return error


@atexit.register
def _close_all() -> None:
    """Threads of an interpreter that ends must not be found in C++ code."""
    ending = [(thread, stop) for thread, stop in list(_stops.items()) if thread.is_alive()]
    for _, stop in ending:
        stop()
    for thread, _ in ending:
        thread.join(_JOIN_SECONDS)
