"""The threads of DataParallel's replicas: Python's own, so that Python code may run on them."""

from __future__ import annotations

import contextvars
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from trireme import _C
from trireme._core.errors import note
from trireme._core.worker_threads import start_threads

T = TypeVar("T")


class _Stopped(BaseException):
    """Raised in a replica because another one has failed."""


class ReplicaThreads:
    """One thread per replica, for as long as this object, or a graph of the replicas, lives.

    `intra_op_threads`: what each computes with; the caller's number stays as it is.
    """

    def __init__(self, devices: Sequence[torch.device], intra_op_threads: Sequence[int]) -> None:
        self.pool = _C.WorkerPool(devices=list(devices), intra_op_threads=list(intra_op_threads))
        self.process = os.getpid()
        self.turn = threading.Lock()  # who uses the replicas holds it
        self._busy = [False] * len(devices)
        self._sent: set[int] = set()  # replicas that were told to stop, and have not heard it
        self._lock = threading.Lock()
        self._idents = start_threads(self.pool, len(devices), "trireme-replica")

    def is_this_one_of_them(self) -> bool:
        """Whether a replica's thread calls."""
        return threading.get_ident() in self._idents

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
                for _ in range(1000):  # it is raised at one of these lines, not in the next job
                    if replica not in self._sent:
                        break
                self._sent.discard(replica)  # a finalizer has swallowed it
            except _Stopped as stop:
                self._set_busy(replica, False)
                self._sent.discard(replica)
                errors[position] = errors[position] or stop

        self._sent.clear()
        wait(job, self._stop_busy)
        for position, error in enumerate(errors):
            if error is not None and not isinstance(error, _Stopped):
                errors.clear()  # their tracebacks hold this frame
                note(error, f"[data_parallel] in the forward of {names(replicas[position])}")
                raise error
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
