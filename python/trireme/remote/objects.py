"""Objects that other processes call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, overload

from trireme import _C
from trireme._C import RemoteRef
from trireme.remote.areas import AREA
from trireme.remote.endpoint import expect_name, names, running, seconds_of
from trireme.remote.functions import Pending
from trireme.remote.signatures import parameters_of

Function = TypeVar("Function", bound=Callable[..., Any])

_BATCH = "_remote_batch"
_OF_REF = ("owner", "local_value")
"""What a Ref has itself, so that no method of an object can be called so."""


@overload
def method(function: Function) -> Function: ...
@overload
def method(*, batch: int | None = None) -> Callable[[Function], Function]: ...
def method(function: Any = None, *, batch: int | None = None) -> Any:
    """Lets others call a method of an :class:`Object`.

    With ``batch=n`` it runs once for n calls, of whatever callers: each argument is the list of
    what these calls have passed, and it returns a list of n results. torch's equivalent is
    ``rpc.functions.async_execution``.
    """
    if batch is not None:
        AREA.expect("batch", batch, int, "an int", next_step="Pass how many calls run at once.")
        if batch < 1:
            AREA.refuse(f"got batch={batch}, expected at least 1", "Leave it out for none.")
    if function is None:
        return lambda given: _marked(given, batch or 0)
    return _marked(function, 0)


def _marked(function: Any, batch: int) -> Any:
    if not callable(function):
        got = f"got {type(function).__name__} as a method, expected a function"
        AREA.refuse(got, "Put @remote.method above a def.", kind=TypeError)
    setattr(function, _BATCH, batch)
    return function


class Object:
    """A class whose objects others call. A class that extends it is registered by its name, and so
    are those of its methods that are marked by :func:`method`, inherited ones, too. Threads of the
    endpoint call methods, several at one time."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name, place = cls.__name__, _place_of_statement()
        parameters, count = "()", 0
        if cls.__init__ is not object.__init__:
            parameters, count = parameters_of(cls.__init__, skip=1)
        methods = [(method, *parameters_of(method[1], skip=1)) for method in _methods_of(cls)]
        _C.remote_define(name, parameters, count, place, cls, "class", 0)
        for (method_name, function, batch), shown, number in methods:
            _C.remote_define(
                f"{name}.{method_name}", shown, number, place, function, "method", batch
            )


def _place_of_statement() -> str:
    """Says where the class statement is that runs now."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in ("__init_subclass__", "__new__") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _methods_of(cls: type) -> list[tuple[str, Callable[..., Any], int]]:
    """Returns name, function and batch of marked methods; one that replaces such is one, too.

    Raises:
        ValueError: no Ref could call it, because of its name.
    """
    found: dict[str, tuple[str, Callable[..., Any], int]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            batch = getattr(value, _BATCH, found[name][2] if name in found else None)
            if batch is not None and callable(value):
                found[name] = (name, value, batch)
            else:
                found.pop(name, None)
    for name in found:
        if name in _OF_REF or name.startswith("_"):
            got = f"got a method called {name} of {cls.__qualname__}, which no Ref could call"
            AREA.refuse(got, "Give it another name.")
    return list(found.values())


class Ref:
    """Stands for an object of some process, which lives as long as any Ref to it does.

    Its methods are those of the object: ``ref.act(x, timeout=2)`` calls one and returns its result,
    ``ref.act.start(x)`` returns a :class:`Pending`. Refs are values, and may be passed on. torch's
    equivalent is ``RRef``.
    """

    __slots__ = ("_methods", "_ref")

    def __init__(self, ref: RemoteRef) -> None:
        self._ref = ref
        self._methods: dict[str, RemoteMethod] | None = None

    @property
    def owner(self) -> str:
        """The name of the process that has the object."""
        return names()[self._ref.owner]

    def local_value(self) -> Any:
        """Returns the object itself.

        Raises:
            RuntimeError: it is in another process.
        """
        if running().rank != self._ref.owner:
            got = f"got local_value() of an object at {self.owner!r}"
            AREA.refuse(got, "Call its methods.", kind=RuntimeError)
        return running().local_value(self._ref)

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(f"a Ref has no attribute {name!r}")
        if self._methods is None:
            all_names = running().methods_of(self._ref)
            self._methods = {name: RemoteMethod(self._ref, name) for name in all_names}
        found = self._methods.get(name)
        if found is None:
            there = ", ".join(self._methods) or "none"
            got = f"got {name!r} of a {self._ref.class_name}, whose methods are: {there}"
            AREA.refuse(got, "Call one of these.", kind=AttributeError)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self._ref == other._ref

    def __hash__(self) -> int:
        return hash(self._ref)

    def __repr__(self) -> str:
        ref = self._ref
        return f"<Ref of object {ref.number} of class {ref.class_name}, rank {ref.owner}>"

    def __copy__(self) -> Ref:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        AREA.refuse("got a Ref to pickle", "Pass it as an argument of a call.", kind=TypeError)


class RemoteMethod:
    """A method of an object that is elsewhere."""

    __slots__ = ("_name", "_ref")

    def __init__(self, ref: RemoteRef, name: str) -> None:
        self._ref, self._name = ref, name

    def __call__(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Calls it and returns its result, as :func:`call` does."""
        return running().call("", self._name, self._ref, args, kwargs, seconds_of(timeout))

    def start(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Pending:
        """Begins a call of it."""
        core = running()
        seconds = seconds_of(timeout)
        return Pending(core.call_async("", self._name, self._ref, args, kwargs, seconds))


def create(
    to: str, cls: type[Object] | str, /, *args: Any, timeout: float | None = None, **kwargs: Any
) -> Ref:
    """Makes an object at another process, or at this one, with these arguments.

    Args:
        to: one of :func:`names`.
        cls: a class that extends :class:`Object`, or the name of one, which may be of C++.

    Raises: what :func:`call` does, of its constructor.
    """
    if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, Object)):
        shown = getattr(cls, "__qualname__", type(cls).__name__)
        got = f"got {shown} to create, expected a subclass of remote.Object"
        AREA.refuse(got, "Pass a class that extends remote.Object, or its name.", kind=TypeError)
    name = cls if isinstance(cls, str) else cls.__name__
    core = running()
    expect_name(to)
    made = core.create(to, name, args, kwargs, seconds_of(timeout))
    assert isinstance(made, Ref)
    return made


def here(obj: Object) -> Ref:
    """Returns a Ref to an object of this process, for others to call. It keeps the object."""
    if not isinstance(obj, Object):
        got = f"got {type(obj).__name__} to refer to, expected an object of a remote.Object"
        AREA.refuse(got, "Let its class extend remote.Object.", kind=TypeError)
    return Ref(running().here(obj, type(obj).__name__))


_C.remote_use_ref_type(Ref)
