"""Functions that other processes call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trireme import _C
from trireme._C import RemotePending
from trireme.remote.areas import AREA
from trireme.remote.endpoint import expect_name, running, seconds_of
from trireme.remote.signatures import parameters_of

Function = TypeVar("Function", bound=Callable[..., Any])

_names: dict[Any, str] = {}
"""The registered functions, and those that a later definition at the same place has replaced."""


def function(function: Function) -> Function:
    """Registers a function by its ``__name__``, and returns it as it is.

    Others call it by :func:`call`; one that returns a module is a factory for
    :class:`Module`. Threads of the endpoint call it, several at one time. Called before
    :func:`start`, on the ranks that are called and on those that call.

    Raises:
        TypeError: it is no function.
        ValueError: it has a parameter called "timeout".
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        got = f"got {type(function).__name__} to register, expected a function"
        AREA.refuse(got, "Put @remote.function above a def.", kind=TypeError)
    parameters, count = parameters_of(function)
    _C.remote_define(name, parameters, count, _place_of(function), function, "function", 0)
    _names[function] = name
    return function


def _place_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{function.__module__}.{getattr(function, '__qualname__', '')}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def name_of(function: Callable[..., Any] | str) -> str:
    """Returns the name by which a function was registered; a name is one by itself.

    Raises:
        TypeError: it was not registered.
    """
    if isinstance(function, str):
        return function
    try:
        return _names[function]
    except (KeyError, TypeError):  # TypeError: it has no hash
        shown = getattr(function, "__qualname__", type(function).__name__)
        got = f"got {shown} to call, which was not registered"
        AREA.refuse(got, "Put @remote.function above it, or pass a name.", kind=TypeError)


class Pending:
    """A call on its way. Any thread may ask."""

    __slots__ = ("_core",)

    def __init__(self, core: RemotePending) -> None:
        self._core = core

    def wait(self) -> Any:
        """Returns the result, or raises what the call ended with; again and again."""
        return self._core.wait()

    def is_completed(self) -> bool:
        """Says whether wait() would return, or raise, at once."""
        return self._core.is_completed()


def call(
    to: str, function: Callable[..., Any] | str, /, *args: Any, timeout: float | None = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Calls a function at another process, or at this one, and returns its result.

    Arguments and results are None, bool, int, float, complex, str, bytes, tensors, Refs, and
    lists, tuples, sets and dicts of them; all are copied, tensors without their graph. One message
    goes there and one comes back. torch's equivalent is ``rpc.rpc_sync``.

    Args:
        to: one of :func:`names`.
        function: a registered function, or its name.
        timeout: seconds; 30 minutes if there is none.

    Raises:
        TypeError, ValueError: an argument is none of these values, and its place is in the text;
            nobody is called so; there is no such function there, and the text says what there is.
        Exception: what the function has raised: built-in types as they are, others as RuntimeError
            that names the class. Its notes have function, rank and traceback.
        DistBackendError: the callee is gone, or has not answered in time; the text names it and the
            function.
        RuntimeError: before :func:`start`, after :func:`stop`, and in a forked child.
    """
    core = running()
    expect_name(to)
    return core.call(to, name_of(function), None, args, kwargs, seconds_of(timeout))


def call_async(
    to: str, function: Callable[..., Any] | str, /, *args: Any, timeout: float | None = None,
    **kwargs: Any,
) -> Pending:  # fmt: skip
    """Begins a call and returns at once. It is like :func:`call` otherwise, and what that raises of
    the callee :meth:`Pending.wait` does. torch's equivalent is ``rpc.rpc_async``."""
    core = running()
    expect_name(to)
    return Pending(core.call_async(to, name_of(function), None, args, kwargs, seconds_of(timeout)))
