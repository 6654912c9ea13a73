"""What crosses between stages: tensors, and a text from which the value around them is built."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections import OrderedDict
from typing import Any, NoReturn

from torch import Size, Tensor

from trireme._pipeline import refuse

# [Note: the text of a value]
#
# One tensor has an empty text, which is the case of nearly all models. Any other value is a tree of
# nodes ("kind", ...), written as JSON around the numbers of its tensors. Each kind has a letter:
# T a tensor, t tuple, s torch.Size, l list, d dict, o OrderedDict, n a named tuple, c a dataclass;
# i, b, f, z, u and N are int, bool, float, complex, str and None. Types are exact, so that 1, True
# and 1.0 stay what they are. A class is looked up among the modules that the receiver has imported,
# and its objects are made without calling anything of it: a text runs no code.

Text = tuple[list[Tensor], str]
_Node = tuple[Any, ...]

_PLAIN: dict[type, Any] = {
    int: lambda value: ("i", str(value)),
    bool: lambda value: ("b", int(value)),
    float: lambda value: ("f", value.hex()),
    complex: lambda value: ("z", value.real.hex(), value.imag.hex()),
    str: lambda value: ("u", value),
    type(None): lambda value: ("N",),
}
_SEQUENCES: dict[type, str] = {tuple: "t", list: "l", Size: "s"}
_MAPPINGS: dict[type, str] = {dict: "d", OrderedDict: "o"}
_MADE_BY: dict[str, Any] = {"t": tuple, "l": list, "s": Size, "d": dict, "o": OrderedDict}
_NUMBERS: dict[str, Any] = {
    "i": int,
    "b": bool,
    "f": float.fromhex,
    "u": str,
    "z": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "N": lambda: None,
}


def take_apart(value: Any, where: str) -> Tensor | Text:
    """Returns one tensor as it is, and anything else as its tensors and their text.

    ``where`` names the stage in errors.
    """
    if isinstance(value, Tensor):
        return value
    taking = _Taking(where)
    return taking.tensors_of(value)


def one_or_text(tensors: list[Tensor], text: str) -> Tensor | Text:
    """Returns the one tensor that has no text, or both."""
    return (tensors, text) if text else tensors[0]


def put_together(value: Tensor | Text) -> Any:
    """Builds what :func:`take_apart` was given."""
    if isinstance(value, Tensor):
        return value
    tensors, text = value
    return _build(_node_of(text), tensors)


class _Taking:
    def __init__(self, where: str) -> None:
        self._where = where
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def tensors_of(self, value: Any) -> Text:
        node = self._node(value)
        return self._tensors, _text_of(node)

    def _node(self, value: Any) -> _Node:
        if isinstance(value, Tensor):
            # A tensor that comes twice is sent once, and its gradients meet on the other side.
            number = self._numbers.setdefault(id(value), len(self._tensors))
            if number == len(self._tensors):
                self._tensors.append(value)
            return ("T", number)
        kind = type(value)
        if kind in _PLAIN:
            node: _Node = _PLAIN[kind](value)
            return node
        if kind in _SEQUENCES:
            return (_SEQUENCES[kind], *map(self._node, value))
        if kind in _MAPPINGS:
            items = ((self._key(key), self._node(item)) for key, item in value.items())
            return (_MAPPINGS[kind], *items)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return ("n", *self._class(kind), *map(self._node, value))
        if dataclasses.is_dataclass(kind) and not issubclass(kind, dict | list | tuple):
            return ("c", *self._class(kind), *self._fields(value))
        self._refuse(f"a {kind.__name__}", "Return tensors and plain values.")

    def _key(self, key: Any) -> _Node:
        if type(key) not in _PLAIN and type(key) is not tuple:
            self._refuse(f"a dict with a {type(key).__name__} as key", "Use texts or numbers.")
        return self._node(key)

    def _fields(self, value: Any) -> list[tuple[str, _Node]]:
        names = [field.name for field in dataclasses.fields(value)]
        beside = sorted(set(getattr(value, "__dict__", ())) - set(names))
        if beside:
            got = f"a {type(value).__name__} with attributes that are no fields ({beside[0]})"
            self._refuse(got, "Declare them.")
        return [(name, self._node(getattr(value, name))) for name in names]

    def _class(self, kind: type) -> tuple[str, str]:
        name = kind.__module__, kind.__qualname__
        if _found(*name) is not kind:
            got = f"a {kind.__qualname__}, which another rank cannot find by its name"
            self._refuse(got, f"Define the class on the top level of {kind.__module__}.")
        return name

    def _refuse(self, got: str, next_step: str) -> NoReturn:
        refuse(
            f"{self._where} returned {got}, expected tensors, tuples, lists, dicts, named tuples, "
            "dataclasses, numbers, texts and None",
            next_step,
            kind=TypeError,
        )


def _found(module: str, qualified_name: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in qualified_name.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found


@functools.lru_cache(maxsize=256)
def _text_of(node: _Node) -> str:
    return json.dumps(node, separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def _node_of(text: str) -> list[Any]:
    node: list[Any] = json.loads(text)
    return node


def _build(node: list[Any], tensors: list[Tensor]) -> Any:
    kind, *rest = node
    if kind == "T":
        return tensors[rest[0]]
    if kind in ("t", "l", "s"):
        return _MADE_BY[kind](_build(item, tensors) for item in rest)
    if kind in ("d", "o"):
        return _MADE_BY[kind]((_build(key, tensors), _build(item, tensors)) for key, item in rest)
    if kind in ("n", "c"):
        return _build_object(kind, rest, tensors)
    return _NUMBERS[kind](*rest)


def _build_object(kind: str, rest: list[Any], tensors: list[Tensor]) -> Any:
    module, name, *parts = rest
    found = _found(module, name)
    if kind == "n":
        if not isinstance(found, type) or not issubclass(found, tuple):
            _refuse_class(module, name, "a named tuple")
        return tuple.__new__(found, [_build(part, tensors) for part in parts])
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        _refuse_class(module, name, "a dataclass")
    made = object.__new__(found)
    for field, part in parts:
        object.__setattr__(made, field, _build(part, tensors))
    return made


def _refuse_class(module: str, name: str, expected: str) -> NoReturn:
    refuse(
        f"got {module}.{name} from another stage, expected {expected} that this rank knows, too",
        f"Import {module} on all ranks.",
        kind=TypeError,
    )
