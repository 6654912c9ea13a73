"""Exceptions of a callee: what their caller gets."""

from __future__ import annotations

import pytest
from trireme import remote

from remote.functions import add
from remote.ranks import full_text, on_remote_ranks, on_remote_shm_and_gloo_ranks, raised


class Broken(Exception):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ArithmeticError("no text")


@remote.function
def fail_as(case: str) -> None:
    if case == "decoding":
        b"\xff".decode()
    if case == "division":
        print(1 / 0)
    raise ERRORS[case]


KEPT = {
    kind.__name__: kind
    for kind in (
        *(ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError, NotImplementedError),
        *(ArithmeticError, AssertionError, AttributeError, FileNotFoundError, OSError, MemoryError),
        *(PermissionError, TimeoutError, Exception, LookupError, EOFError, ConnectionError),
    )
}
CHANGED = [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, Broken]
ERRORS: dict[str, BaseException] = {
    **{name: kind("the text of it") for name, kind in KEPT.items()},
    **{kind.__name__: kind("the text of it") for kind in CHANGED},
    "key": KeyError("missing"),
    "surrogates": ValueError("left \ud800\udcff right"),
    "unprintable": Unprintable(),
    "empty": ValueError(),
    "nested": ValueError("[remote] looks like ours\nsecond line\0"),
    "long": ValueError("x" * 1_000_000),
}


@on_remote_shm_and_gloo_ranks(2)
def test_built_in_exceptions_keep_type_and_text(rank: int) -> None:
    if rank == 1:
        return
    for to, where in (("p1", "p1 (rank 1)"), ("p0", "p0 (rank 0)")):
        for name, kind in KEPT.items():
            with pytest.raises(kind) as caught:
                remote.call(to, fail_as, name)
            assert type(caught.value) is kind and str(caught.value) == "the text of it"
            text = full_text(caught.value)
            assert f"function fail_as at {where}" in text
            for part in ("raise ERRORS[case]", "test_exceptions.py"):  # the traceback there
                assert part in text, f"{name}: {text}"
        with raised(ZeroDivisionError, "division by zero", "print(1 / 0)"):
            remote.call(to, fail_as, "division")
        assert remote.call(to, add, 1, 2) == 3


@on_remote_ranks(2)
def test_other_exceptions_name_their_class(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for kind in CHANGED:
            with raised(RuntimeError, kind.__name__, "the text of it", "function fail_as at " + to):
                remote.call(to, fail_as, kind.__name__)
        with raised(RuntimeError, f"{Broken.__module__}.Broken: the text of it"):
            remote.call(to, fail_as, "Broken")
        with raised(RuntimeError, "UnicodeDecodeError", "0xff"):
            remote.call(to, fail_as, "decoding")
        with raised(RuntimeError, "Unprintable"):
            remote.call(to, fail_as, "unprintable")
        assert remote.call(to, add, 1, 2) == 3


@on_remote_ranks(2)
def test_texts_of_exceptions(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        with pytest.raises(KeyError) as key:
            remote.call(to, fail_as, "key")
        assert str(key.value).strip("'\"") == "missing"
        with pytest.raises(ValueError) as strange:
            remote.call(to, fail_as, "surrogates")
        text = full_text(strange.value)
        assert "left " in text and " right" in text
        text.encode()
        with raised(ValueError, "looks like ours", "second line", "function fail_as at " + to):
            remote.call(to, fail_as, "nested")
        with raised(ValueError, "function fail_as at " + to):
            remote.call(to, fail_as, "empty")
        with raised(ValueError, "x" * 1000):
            remote.call(to, fail_as, "long")
