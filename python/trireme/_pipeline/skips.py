"""Tensors that go past layers: one stashes them, a later one pops them. Words are torchgpipe's."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from trireme import _C
from trireme._pipeline import refuse

_Module = TypeVar("_Module", bound=nn.Module)
_NOTHING = object()


class SkipError(ValueError, RuntimeError):
    """A forward stashes or pops otherwise than it declares. It is both what torchgpipe raises and
    what this library raises for wrong arguments."""


class Namespace:
    """Tells apart skips of one name: see :func:`skippable`."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._label = f"namespace {next(Namespace._numbers)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._label == other._label

    def __hash__(self) -> int:
        return hash(self._label)


@dataclass(frozen=True)
class _Declared:
    stashes: tuple[str, ...]
    pops: tuple[str, ...]


class _HasSkips(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, nn.Module) and hasattr(subclass, "_trireme_skips")


class Skippable(metaclass=_HasSkips):
    """Is what :func:`skippable` makes of a class: ``isinstance`` tells its layers."""


class _State(threading.local):
    layer: nn.Module | None = None
    """Which skippable layer runs."""
    open: set[tuple[str, str]] | None = None
    """What this layer has declared, and not done yet in the forward that runs."""
    last: Any = _NOTHING
    """What the last stash or pop returned, which a forward may yield."""
    kept: dict[str, Tensor | None] | None = None
    """Where layers are run one by one: what was stashed, for as many pops as come."""


_state = _State()


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[_Module]], type[_Module]]:
    """Declares which tensors the forward of a layer hands past others, and which it takes.

    A pipeline takes them straight from the stage that stashes to the one that pops. The class stays
    what it is, and works outside of pipelines, too::

        @trireme.skippable(stash=["skip"])
        class Down(nn.Module):
            def forward(self, x):
                trireme.stash("skip", x)
                return self.layers(x)

        @trireme.skippable(pop=["skip"])
        class Up(nn.Module):
            def forward(self, x):
                return self.layers(x) + trireme.pop("skip")

    A forward written for torchgpipe, which yields what ``stash`` and ``pop`` return, works as it
    is. Where a module has several layers of one class, ``layer.isolate(namespace)`` tells their
    names apart: layers that were given the same :class:`Namespace` share them.

    Args:
        stash: Names under which the forward stashes a tensor, or None: once for each.
        pop: Names that it pops, once each.

    Raises:
        TypeError: what is decorated is no class of modules; names that are no strings.
        ValueError: in a forward, a name that is not declared, is popped before it is stashed, or
            is not stashed or popped though it is declared. It is a RuntimeError, too, as in
            torchgpipe.
    """
    declared = _Declared(_names("stash", stash), _names("pop", pop))
    steps = [("stash", stash) for stash in declared.stashes] + [
        ("pop", pop) for pop in declared.pops
    ]

    def decorate(cls: type[_Module]) -> type[_Module]:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            refuse(f"got {cls!r}, expected a class of modules", "Decorate the class.",
                   kind=TypeError)  # fmt: skip
        forward = cls.forward

        @functools.wraps(forward)
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outer = _state.layer, _state.open
            _state.layer, _state.open = self, set(steps)
            try:
                result = forward(self, *args, **kwargs)
                if isinstance(result, Generator):
                    result = _drive(result)
                if _state.open:
                    _refuse_left_out(self, _state.open)
                return result
            finally:
                _state.layer, _state.open = outer

        plain = cls.__repr__

        def represent(self: nn.Module) -> str:
            return f"@skippable({plain(self)})"

        cls.forward = run
        cls.__repr__ = represent  # type: ignore[method-assign]
        cls._trireme_skips = declared  # type: ignore[attr-defined]
        cls.isolate = _isolate  # type: ignore[attr-defined]
        return cls

    return decorate


def stash(name: str, tensor: Tensor | None) -> None:
    """Hands a tensor to the layer that pops ``name``; see :func:`skippable`."""
    key = _key_here(name, "stash")
    if not isinstance(tensor, Tensor | None):
        got = f"got a {type(tensor).__name__} to stash as '{name}', expected a tensor or None"
        refuse(got, "Stash tensors one by one.", kind=TypeError)
    if _state.kept is None:
        try:
            _C.stash(key, tensor)
        except ValueError as error:
            raise SkipError(str(error)) from None
    else:
        alone = tensor if tensor is None else tensor.detach()
        if alone is not None and tensor is not None:
            alone.requires_grad_(tensor.requires_grad)
        _state.kept[key] = alone
    _state.last = None


def pop(name: str) -> Tensor | None:
    """Returns what another layer stashed as ``name``; see :func:`skippable`."""
    key = _key_here(name, "pop")
    if _state.kept is None:
        try:
            found = _C.pop(key)
        except ValueError as error:
            raise SkipError(str(error)) from None
    elif key in _state.kept:
        found = _state.kept[key]
    else:
        got = f"got a pop of '{name}', which nothing has stashed"
        refuse(got, "Stash it before.", kind=SkipError)
    _state.last = found
    return found


@contextmanager
def keeping_skips() -> Iterator[None]:
    """Lets layers be run one by one, each several times: what was stashed stays, without graph."""
    outer, _state.kept = _state.kept, {}
    try:
        yield
    finally:
        _state.kept = outer


def skips_between(layers: Mapping[str, nn.Module]) -> list[tuple[str, int, int]]:
    """Returns name, number of the stashing layer and of the popping one, in the order of pops.

    Namespaces are numbered anew in the order of layers, so that ranks say the same of one module.
    """
    namespaces: dict[Namespace, str] = {}
    for layer in layers.values():
        for inner in layer.modules():
            if _declared_of(inner) is None:
                continue
            keys = {}
            for name, namespace in _namespaces_of(inner).items():
                label = namespaces.setdefault(namespace, f"namespace {len(namespaces) + 1}")
                keys[name] = f"{name} of {label}"
            inner.__dict__["_skip_keys"] = keys
    return pair_skips({name: skips_of(layer) for name, layer in layers.items()}, "layer")


SkipsOf = tuple[list[str], list[str]]


def skips_of(module: nn.Module) -> SkipsOf:
    """Returns what the layers in a module stash, and what they pop, in their order."""
    stashes: list[str] = []
    pops: list[str] = []
    for inner in module.modules():
        declared = _declared_of(inner)
        if declared is not None:
            keys: dict[str, str] = inner.__dict__.get("_skip_keys", {})
            stashes += [keys.get(name, name) for name in declared.stashes]
            pops += [keys.get(name, name) for name in declared.pops]
    return stashes, pops


def declared_names(module: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Returns what a layer, or layers in it, stash and pop: by key the name that was declared."""
    stashes: dict[str, str] = {}
    pops: dict[str, str] = {}
    for inner in module.modules():
        declared = _declared_of(inner)
        if declared is not None:
            keys: dict[str, str] = inner.__dict__.get("_skip_keys", {})
            stashes.update((keys.get(name, name), name) for name in declared.stashes)
            pops.update((keys.get(name, name), name) for name in declared.pops)
    return stashes, pops


def pair_skips(declared: Mapping[str, SkipsOf], what: str) -> list[tuple[str, int, int]]:
    """Finds who pops what somebody stashes, among layers or stages (``what``) in their order.

    Returns:
        Name, number of the stashing one and of the popping one, in the order of pops.
    """
    stashes: dict[str, int] = {}
    pops: dict[str, int] = {}
    names = list(declared)

    def declare(place: dict[str, int], key: str, number: int, verb: str) -> None:
        if key in place:
            first, second = names[place[key]], names[number]
            both = f"{what}s {first} and {second}" if first != second else f"{what} {first} twice"
            refuse(f"got '{key}' that {verb} in {both}, expected it once",
                   "Give one of them another name, or isolate() it.")  # fmt: skip
        place[key] = number

    for number, (stashed, popped) in enumerate(declared.values()):
        for key in stashed:
            declare(stashes, key, number, "is stashed")
        for key in popped:
            declare(pops, key, number, "is popped")
    for key, number in stashes.items():
        if key not in pops:
            got = f"got '{key}', which {what} {names[number]} stashes and no {what} pops"
            refuse(got, f"Pop it in a later {what}.")
    for key, number in pops.items():
        if key not in stashes:
            got = f"got '{key}', which {what} {names[number]} pops and no {what} stashes"
            refuse(got, f"Stash it in an earlier {what}.")
        if stashes[key] > number:
            got = f"got '{key}', which {what} {names[number]} pops before {what} "
            refuse(f"{got}{names[stashes[key]]} stashes it", f"Pop it in a later {what}.")
    return sorted(((key, stashes[key], pops[key]) for key in pops), key=lambda one: one[2])


def _isolate(
    self: nn.Module, namespace: Namespace, *, only: Iterable[str] | None = None
) -> nn.Module:
    """Puts names of this layer, or only some, into a namespace. Returns the layer."""
    if not isinstance(namespace, Namespace):
        got = f"got a {type(namespace).__name__} as namespace, expected a trireme.Namespace"
        refuse(got, "Make one.", kind=TypeError)
    declared = _declared_of(self)
    assert declared is not None
    all_names = (*declared.stashes, *declared.pops)
    for name in all_names if only is None else _names("only", only):
        if name not in all_names:
            got = f"got '{name}' to isolate, which {type(self).__name__} does not declare"
            refuse(got, "Name what it stashes or pops.")
        self.__dict__.setdefault("_skip_namespaces", {})[name] = namespace
        self.__dict__.setdefault("_skip_keys", {})[name] = f"{name} of {namespace._label}"
    return self


def _drive(forward: Generator[Any, Any, Any]) -> Any:
    """Runs a forward that yields what stash() and pop() return, and hands that back to it."""
    value = None
    while True:
        _state.last = _NOTHING
        try:
            yielded = forward.send(value)
        except StopIteration as end:
            return end.value
        if yielded is not _state.last:
            got = f"got a {type(yielded).__name__} out of a forward that yields"
            refuse(f"{got}, expected what stash() or pop() returned", "Return it.", kind=TypeError)
        value = yielded


def _key_here(name: str, verb: str) -> str:
    layer = _state.layer
    if layer is None:
        return name
    declared = _declared_of(layer)
    assert declared is not None
    if name not in (declared.stashes if verb == "stash" else declared.pops):
        got = f"got a {verb} of '{name}', which {type(layer).__name__} does not declare"
        refuse(got, f"Name it in @skippable({verb}=[...]).", kind=SkipError)
    if _state.open is not None:
        _state.open.discard((verb, name))
    keys: dict[str, str] = layer.__dict__.get("_skip_keys", {})
    return keys.get(name, name)


def _refuse_left_out(layer: nn.Module, steps: set[tuple[str, str]]) -> NoReturn:
    verb, name = min(steps)
    got = f"got no {verb} of '{name}' in the forward of a {type(layer).__name__} that declares it"
    refuse(got, f"Let it {verb} in every forward; a stash may be None.", kind=SkipError)


def _declared_of(module: nn.Module) -> _Declared | None:
    return getattr(type(module), "_trireme_skips", None)


def _namespaces_of(module: nn.Module) -> dict[str, Namespace]:
    return module.__dict__.get("_skip_namespaces", {})


def _names(argument: str, given: Iterable[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        got = f"got {argument}={given!r}, expected a list of names"
        refuse(got, "Pass names as strings.", kind=TypeError)
    return names
