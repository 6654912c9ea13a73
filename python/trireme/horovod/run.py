"""The engine of this process between ``init`` and ``shutdown``."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.horovod.engine import Engine
from trireme.horovod.errors import refuse
from trireme.launch import Context


@dataclass(frozen=True)
class Place:
    """Where this rank is among all, on its host, and among those of its number on other hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


@dataclass(frozen=True)
class Run:
    context: Context
    place: Place
    engine: Engine


_run: Run | None = None


def set_run(run: Run | None) -> None:
    global _run
    _run = run


def current_run() -> Run:
    """Returns the run. Raises ValueError before ``init`` and after ``shutdown``."""
    if _run is None:
        refuse("got a call before hvd.init() or after hvd.shutdown()", "Call hvd.init() first.")
    return _run


def has_run() -> bool:
    return _run is not None


def engine() -> Engine:
    return current_run().engine
