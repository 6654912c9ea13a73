"""What the tests of trireme.remote share: ranks that have started, and how errors are read.

    @on_remote_ranks(2)
    def test_something(rank: int) -> None:
        if rank == 0:
            assert remote.call("p1", add, 1, 2) == 3

Rank r is called "p<r>". A rank whose program has returned serves the others until theirs have, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trireme import remote

from harness.faults import message_of
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from remote import functions, networks, objects


def _among(on: Any, world: int, *, threads: int = 4, **options: Any) -> Any:
    def decorate(program: Callable[..., None]) -> Any:
        @functools.wraps(program)
        def started(rank: int, **case: Any) -> None:
            remote.start(f"p{rank}", threads=threads)
            program(rank, **case)
            remote.stop()
            forget_case()

        return on(world, **{"timeout": 60, **options})(started)

    return decorate


# They do what on_ranks does; `threads` are those of each rank.
on_remote_ranks = functools.partial(_among, on_shm_ranks)
on_remote_shm_and_gloo_ranks = functools.partial(_among, on_shm_and_gloo_ranks)


def forget_case() -> None:
    """Makes what functions of the tests keep in this process as it was when that began."""
    functions.gate.clear()
    functions.entered.clear()
    networks.shared.clear()
    objects.kept.clear()


def full_text(error: BaseException) -> str:
    """The message and the notes."""
    return "\n".join([message_of(error), *getattr(error, "__notes__", [])])


@contextmanager
def raised(kind: type[BaseException], *parts: str) -> Iterator[None]:
    """Expects an error of exactly that type whose text or notes contain ``parts``."""
    try:
        yield
    except BaseException as error:
        if type(error) is not kind:
            raise
        text = full_text(error)
        missing = [part for part in parts if part not in text]
        assert not missing, f"{missing} not in: {text}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


@contextmanager
def refused(kind: type[BaseException], *parts: str) -> Iterator[None]:
    """Expects an error of Trireme's own, in the house form."""
    with raised(kind, "[remote] ", *parts):
        yield
