"""Values that hold others: what is in them, and others like them.

Looked into are tuples, lists, mappings and dataclass instances; what is both a mapping and a
dataclass counts as a mapping. Anything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PLAIN: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
"""Kinds of leaves that are values without tensors; torch.Size, though a tuple, is one."""
_PLAIN = frozenset(PLAIN)


def children(value: Any) -> Sequence[Any] | None:
    """Returns what ``value`` holds, in order: of a mapping its values, of a dataclass the fields
    that are set (those with ``init=False`` need not be). None for a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value
    if kind is dict:
        return list(value.values())
    if kind in _PLAIN:
        return None
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        return [getattr(value, name) for name in field_names(value)]
    return None


def children_like(value: Any, first: Any) -> Sequence[Any] | None:
    """Returns the children of ``value`` in the order of those of ``first``, which is of its type.
    None if it has others: as many items, the same keys or fields are expected."""
    if isinstance(first, Mapping):
        return [value[key] for key in first] if value.keys() == first.keys() else None
    if isinstance(first, (tuple, list)):
        return value if len(value) == len(first) else None
    return children(value) if field_names(value) == field_names(first) else None


def rebuilt(value: Any, held: Sequence[Any]) -> Any:
    """Returns a container like ``value`` that holds ``held`` in place of its children. No
    constructor of a dict, list, tuple or dataclass type is called."""
    kind = type(value)
    if kind is list:
        return list(held)
    if isinstance(value, tuple):
        return _rebuilt_tuple(value, held)
    if kind is dict:
        return dict(zip(value, held, strict=True))
    if isinstance(value, Mapping) and not isinstance(value, dict) and not hasattr(kind, "__copy__"):
        # A shallow copy of an unknown one might share its items with the original.
        return kind(dict(zip(value, held, strict=True)))
    changed = copy.copy(value)
    if isinstance(value, list):
        changed[:] = held
    elif isinstance(value, Mapping):
        for key, child in zip(value, held, strict=True):
            changed[key] = child
    else:
        for name, child in zip(field_names(value), held, strict=True):
            object.__setattr__(changed, name, child)  # frozen ones, too
    return changed


def labels(value: Any) -> list[str]:
    """Returns what follows the name of a container to name each of its children."""
    if isinstance(value, Mapping):
        return [f"[{key!r}]" for key in value]
    if isinstance(value, (tuple, list)):
        fields: Sequence[str] | None = getattr(value, "_fields", None)
        if fields is not None and len(fields) == len(value):
            return [f".{name}" for name in fields]
        return [f"[{i}]" for i in range(len(value))]
    return [f".{name}" for name in field_names(value)]


def field_names(record: Any) -> list[str]:
    """Returns the fields of a dataclass instance that are set."""
    return [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]


Look = Callable[[Any], Sequence[Any] | None]


def tensors_in(value: Any, look: Look = children) -> list[Tensor]:
    """Returns the tensors in ``value``, depth first, a tensor as often as it is there.

    ``look`` says what a value holds; for those who look into fewer kinds than `children`.
    """
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect(value, look, found)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Any], look: Look = children) -> Any:
    """Returns ``value`` with its tensors changed, in the order of `tensors_in`.

    Containers are new ones of the same type; leaves are handed on by reference.
    """
    if isinstance(value, Tensor):
        return change(value)
    held = look(value)
    if held is None:
        return value
    return rebuilt(value, [map_tensors(child, change, look) for child in held])


def _collect(value: Any, look: Look, found: list[Tensor]) -> None:
    for child in look(value) or ():
        if isinstance(child, Tensor):
            found.append(child)
        else:
            _collect(child, look, found)


def _rebuilt_tuple(value: tuple[Any, ...], held: Sequence[Any]) -> tuple[Any, ...]:
    kind: Any = type(value)
    if kind is tuple:
        return tuple(held)
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(held)
    if hasattr(kind, "n_fields"):  # a struct sequence, as torch.return_types has them
        return kind(held)
    changed = tuple.__new__(kind, held)
    if hasattr(value, "__dict__"):
        vars(changed).update(vars(value))
    return changed
