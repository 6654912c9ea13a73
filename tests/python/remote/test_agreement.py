"""What ranks say of themselves when they start: names, threads and definitions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from trireme import remote
from trireme.remote import endpoint
from trireme.remote.signatures import parameters_of

from harness.meeting import PATIENCE_S
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from remote.ranks import refused


@remote.function
def of_all(a: int, b: int = 2) -> int:
    return a * b


# Definitions stay in a process, so cases that define something have processes of their own.


def define_product(default: Any) -> Callable[..., Any]:
    """Defines it at one place of this file, each time with another default."""

    @remote.function
    def product(a: Any, b: Any = default) -> Any:
        return [a, b]

    return product


def start_and_stop(rank: int) -> None:
    remote.start(f"p{rank}")
    other = f"p{1 - rank}"
    assert remote.names() == ["p0", "p1"] and remote.call(other, of_all, 3) == 6
    remote.stop()


def refuses_to_start(rank: int, *parts: str) -> None:
    with refused(ValueError, *parts):
        remote.start(f"p{rank}")
    with refused(RuntimeError, "start"):
        remote.names()


asked = threading.Event()
answered = threading.Event()


@remote.function
def names_there() -> list[str]:
    asked.set()
    try:
        return remote.names()
    finally:
        answered.set()


@on_shm_and_gloo_ranks(2, timeout=60)
def test_a_call_comes_while_start_ends(rank: int) -> None:
    """The function that is called uses the endpoint, for which it waits."""
    asked.clear()
    answered.clear()
    call_at_the_end = endpoint.call_at_the_end

    def end_late(abandon: Callable[[str], None]) -> None:
        assert asked.wait(PATIENCE_S)
        answered.wait(0.2)  # a function that does not wait fails meanwhile
        call_at_the_end(abandon)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(endpoint, "call_at_the_end", end_late)
        remote.start(f"p{rank}")
    if rank == 0:
        assert remote.call("p1", names_there) == ["p0", "p1"]
    remote.stop()


@on_shm_and_gloo_ranks(2, timeout=60)
def test_two_ranks_of_one_name(rank: int) -> None:
    with refused(ValueError, "'same'", "0", "1"):
        remote.start("same")
    start_and_stop(rank)


@on_shm_and_gloo_ranks(2, timeout=60)
def test_a_rank_without_a_name(rank: int) -> None:
    with refused(ValueError, "empty name", "rank 1"):
        remote.start("" if rank == 1 else "p0")
    start_and_stop(rank)


@on_shm_ranks(2, timeout=60)
def test_a_rank_without_threads(rank: int) -> None:
    for threads in (0, -3):
        with refused(ValueError, f"threads={threads}", "rank 0"):
            remote.start(f"p{rank}", threads=threads if rank == 0 else 4)
    start_and_stop(rank)


@on_shm_ranks(3, timeout=60)
def test_names_of_all_kinds(rank: int) -> None:
    names = ["ünïcode 😀", "with 'quotes'", "x" * 1000]
    remote.start(names[rank], threads=rank + 1)
    assert remote.names() == names
    assert [remote.call(name, of_all, rank, 1) for name in names] == [rank] * 3
    remote.stop()


@on_shm_and_gloo_ranks(3, timeout=60)
def test_a_group_of_some_ranks(rank: int) -> None:
    group = dist.new_group([0, 2])
    if rank != 1:
        remote.start(f"p{rank}", group=group)
        assert remote.names() == ["p0", "p2"]
        assert remote.call(f"p{2 - rank}", of_all, 5) == 10
        remote.stop()
    dist.barrier()


@on_shm_and_gloo_ranks(2, timeout=60, fresh=True)
def test_other_defaults(rank: int) -> None:
    define_product(rank)
    refuses_to_start(rank, "function product", "b=0", "b=1", "'p0' (rank 0)", "'p1' (rank 1)")
    product = define_product(7)  # written at one place, it replaces what was there
    remote.start(f"p{rank}")
    assert remote.call(f"p{1 - rank}", product, 1) == [1, 7]
    remote.stop()


def other_parameters(rank: int) -> None:
    if rank == 0:

        @remote.function
        def differs(a: int, b: int) -> int:
            return a

    else:

        @remote.function
        def differs(a: int, c: int) -> int:
            return a


def keyword_only(rank: int) -> None:
    if rank == 0:

        @remote.function
        def differs(a: int, b: int) -> int:
            return a

    else:

        @remote.function
        def differs(a: int, *, b: int) -> int:
            return a


def another_kind(rank: int) -> None:
    if rank == 0:

        @remote.function
        def differs(a: int) -> int:
            return a

    else:

        class differs(remote.Object):
            def __init__(self, a: int) -> None:
                pass


def another_batch(rank: int) -> None:
    class differs(remote.Object):
        @remote.method(batch=2 + rank)
        def act(self, values: list[int]) -> list[int]:
            return values


def another_constructor(rank: int) -> None:
    if rank == 0:

        class differs(remote.Object):
            def __init__(self, a: int) -> None:
                pass

    else:

        class differs(remote.Object):
            def __init__(self, a: int, b: int = 3) -> None:
                pass


def another_method(rank: int) -> None:
    if rank == 0:

        class differs(remote.Object):
            @remote.method
            def act(self, a: int) -> None:
                pass

    else:

        class differs(remote.Object):
            @remote.method
            def act(self) -> None:
                pass


@pytest.mark.parametrize(
    "define",
    [other_parameters, keyword_only, another_kind, another_batch, another_constructor,
     another_method],
    ids=lambda define: define.__name__,
)  # fmt: skip
@on_shm_ranks(2, timeout=60, fresh=True)
def test_definitions_that_differ(rank: int, define: Callable[[int], None]) -> None:
    define(rank)
    refuses_to_start(rank, "differs", "rank 0", "rank 1")


@on_shm_ranks(3, timeout=60, fresh=True)
def test_one_of_three_differs(rank: int) -> None:
    """All raise, also those that agree."""
    define_product(rank == 2)
    with refused(ValueError, "product", "'p2' (rank 2)"):
        remote.start(f"p{rank}")
    define_product(1)
    remote.start(f"p{rank}")
    remote.stop()


@pytest.mark.parametrize("on", ["both", "one"])
@on_shm_ranks(2, timeout=60, fresh=True)
def test_a_function_that_is_defined_twice(rank: int, on: str) -> None:
    @remote.function
    def doubled(a: int) -> int:
        return a

    if on == "both" or rank == 1:

        @remote.function
        def doubled(a: int) -> int:
            return a + 1

    refuses_to_start(rank, "two definitions", "doubled", "p0" if on == "both" else "p1")


@on_shm_ranks(2, timeout=60, fresh=True)
def test_a_class_that_is_defined_twice(rank: int) -> None:
    def first() -> type:
        class Doubled(remote.Object):
            pass

        return Doubled

    def second() -> type:
        class Doubled(remote.Object):
            pass

        return Doubled

    first()
    first()
    start_and_stop(rank)  # the place has not changed
    second()
    refuses_to_start(rank, "two definitions", "Doubled")


@on_shm_and_gloo_ranks(2, timeout=60, fresh=True)
def test_one_side_may_define_more(rank: int) -> None:
    if rank == 1:

        @remote.function
        def only_there(a: int) -> int:
            return a + 1

        class OnlyThere(remote.Object):
            @remote.method
            def get(self) -> int:
                return 7

    remote.start(f"p{rank}")
    if rank == 0:
        assert remote.call("p1", "only_there", 3) == 4
        assert remote.create("p1", "OnlyThere").get() == 7
    else:
        with refused(ValueError, "only_there", "'of_all'"):
            remote.call("p0", only_there, 3)
        with refused(ValueError, "OnlyThere"):
            remote.create("p0", OnlyThere)
    remote.stop()


@on_shm_ranks(2, timeout=60, fresh=True)
def test_what_is_defined_later_is_there_after_the_next_start(rank: int) -> None:
    remote.start(f"p{rank}")
    remote.stop()
    product = define_product(5)
    remote.start(f"p{rank}")
    assert remote.call(f"p{1 - rank}", product, 1) == [1, 5]
    remote.stop()


def test_no_parameter_is_called_timeout() -> None:
    with pytest.raises((TypeError, ValueError), match="timeout"):

        @remote.function
        def waits(a: int, timeout: float) -> None:
            pass

    with pytest.raises((TypeError, ValueError), match="timeout"):

        class Waits(remote.Object):
            @remote.method
            def act(self, *, timeout: float = 1.0) -> None:
                pass

    with pytest.raises((TypeError, ValueError), match="timeout"):

        class Makes(remote.Object):
            def __init__(self, timeout: float) -> None:
                pass


def test_what_cannot_be_defined() -> None:
    for wrong in (3, "name", None):
        with pytest.raises(TypeError):
            remote.function(wrong)
    for batch in (0, -1):
        with pytest.raises(ValueError, match="batch"):

            class Gathers(remote.Object):
                @remote.method(batch=batch)
                def act(self, values: list[int]) -> list[int]:
                    return values


@pytest.mark.parametrize("name", ["owner", "local_value", "_private"])
def test_no_method_is_called_as_what_a_ref_has(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        type("Hides", (remote.Object,), {name: remote.method(lambda self: None)})


def test_defaults_have_one_text_in_every_process() -> None:
    names = {"one", "two", "three", "four"}  # their order depends on the process

    one, other, last = (frozenset(names),), {"key": [names]}, object()

    def function(a: Any = one, b: Any = other, c: Any = last) -> None:
        pass

    text, count = parameters_of(function)
    shown = "{'four', 'one', 'three', 'two'}"
    assert text == f"(a=tuple({shown}), b={{'key': list({shown})}}, c=<object>)"
    assert count == 3


@on_shm_ranks(1, timeout=60)
def test_a_callee_is_a_name(rank: int) -> None:
    remote.start("alone")
    for wrong in (0, None, b"alone"):
        for call in (
            lambda to=wrong: remote.call(to, of_all, 1),
            lambda to=wrong: remote.call_async(to, of_all, 1),
            lambda to=wrong: remote.create(to, "Nothing"),
            lambda to=wrong: remote.Module(to, of_all),
        ):
            with refused(TypeError, "to is ", "names()"):
                call()
    remote.stop()


@on_shm_ranks(1, timeout=60)
def test_a_rank_alone_calls_itself(rank: int) -> None:
    remote.start("alone")
    assert remote.names() == ["alone"] and remote.call("alone", of_all, 3) == 6
    remote.stop()
