"""Lets a test function be the program of its ranks.

    @on_ranks(2)
    def test_something(rank: int) -> None:
        model = trireme.DistributedDataParallel(...)

Every rank is a process of its own, in a group that is the test's; an assertion that fails on one
fails the test.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Collection
from typing import Any

import pytest

from harness.meeting import PATIENCE_S, group_of_ranks
from harness.ranks import run_ranks

WORLD = 2

# The timeout of a group where failures end every wait at once: if one does not, run_ranks ends the
# test, with the stack of each rank.
AGES_S = 300.0


Program = Callable[..., None]


def on_ranks(
    world: int | str = WORLD,
    *,
    timeout: float = 60,
    patience_s: float = PATIENCE_S,
    backend: str = os.environ.get("TRIREME_TEST_BACKEND", "gloo"),
    dying: Collection[int] = (),
    prepare: Callable[[int], None] | None = None,
    fresh: bool = False,
) -> Any:
    """Runs the decorated test on ``world`` ranks; it gets its ``rank`` before its other arguments.

    ``world`` may be the name of an argument of the test that holds the number. ``patience_s`` is
    the timeout of the group, ``timeout`` that of the whole test; see run_ranks for ``dying``
    and ``fresh``. ``prepare`` is called with the rank, before there is a group.
    """

    def decorate(program: Program) -> Program:
        @functools.wraps(program)
        def test(**case: Any) -> None:
            count = case[world] if isinstance(world, str) else world
            options = {"timeout": timeout, "dying": dying, "fresh": fresh}
            place = (Wrapped(program), backend, patience_s, prepare)
            run_ranks(run_program, count, *place, case, **options)

        test.__signature__ = signature_without_rank(program)  # type: ignore[attr-defined]
        return test

    return decorate


on_gloo_ranks = functools.partial(on_ranks, backend="gloo")


def signature_without_rank(program: Program) -> inspect.Signature:
    signature = inspect.signature(program)
    asked = [parameter for name, parameter in signature.parameters.items() if name != "rank"]
    return signature.replace(parameters=asked)


class Wrapped:
    """A function that a decorator of this kind has replaced: pickles by the name of the test."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __reduce__(self) -> Any:
        return _wrapped_by, (self.program.__module__, self.program.__qualname__)


def _wrapped_by(module: str, name: str) -> Wrapped:
    return Wrapped(getattr(importlib.import_module(module), name).__wrapped__)


def run_program(
    rank: int,
    test: Wrapped,
    backend: str,
    patience_s: float,
    prepare: Callable[[int], None] | None,
    case: Any,
) -> None:
    """Runs on one rank what ``on_ranks`` and its kin have decorated."""
    if prepare is not None:
        prepare(rank)
    with group_of_ranks(backend, patience_s):
        test.program(rank, **case)


# May be another one, to run the tests of a strategy over that.
_SHM = os.environ.get("TRIREME_TEST_BACKEND", "trireme")
on_shm_ranks = functools.partial(on_ranks, backend=_SHM)


BACKENDS = pytest.mark.parametrize("backend", ["gloo", "trireme"])


def on_shm_and_gloo_ranks(world: int | str, **options: Any) -> Any:
    """Runs the decorated test where ranks share memory, and where they do not; see on_ranks."""

    def decorate(program: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("backend", [_SHM, "gloo"])
        @functools.wraps(program)
        def test(backend: str, **case: Any) -> None:
            on_ranks(world, backend=backend, **options)(program)(**case)

        of_program = signature_without_rank(program)
        backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = of_program.replace(
            parameters=[*of_program.parameters.values(), backend]
        )
        return test

    return decorate
