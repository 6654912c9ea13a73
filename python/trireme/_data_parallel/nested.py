"""Tensors in nested inputs and outputs: found, replaced, and matched between replicas.

Looked into are tuples, lists, mappings and dataclass instances; what is both a mapping and a
dataclass counts as a mapping. Anything else is handed on as it is, tensors in it included.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from trireme._data_parallel import refuse

_RETURN_ALIKE = (
    "Return the same structure for every part of a batch, and what depends on it as a tensor."
)
# Kinds of values that can be compared. torch.Size is a tuple that holds no tensors.
_PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None)),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    )
)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in ``value``, depth first: items in their order, fields in that of the class.

    Raises:
        TypeError: for a PackedSequence, whose rows are not along one dimension.
    """
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect(value, found)
    return found


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """``value`` with other tensors: the next of ``tensors`` for each, in the order of `tensors_in`.

    Containers are new ones of the same type, but empty ones, as all that is no tensor, are handed
    on by reference. Constructors of dict, list, tuple and dataclass types are not called.
    """
    if isinstance(value, Tensor):
        return next(tensors)
    children = _children(value)
    if not children:
        return value
    return _rebuilt(value, [with_tensors(child, tensors) for child in children])


def matching_tensors(outputs: Sequence[Any], names: Sequence[str]) -> list[list[Tensor]]:
    """The tensors in each output, all in the order of the first: mappings are matched by key.

    Values that are no tensors have to be equal, and of a type that can be compared, or the very
    same object. ``names``: who returned each output.

    Raises:
        TypeError: another type, or objects that cannot be compared.
        ValueError: another length, other keys, another value.
    """
    if all(map(_is_tensor, outputs)):
        return [[output] for output in outputs]
    found: list[list[Tensor]] = [[] for _ in outputs]
    _match(outputs, "output", names, found)
    return found


def first_tensor(value: Any) -> Tensor | None:
    """The first of the tensors in ``value``, or of a PackedSequence there."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, PackedSequence):
        return value.data
    for child in _children(value) or ():
        tensor = first_tensor(child)
        if tensor is not None:
            return tensor
    return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _collect(value: Any, found: list[Tensor]) -> None:
    children = _children(value)
    if children is None:
        _refuse_packed(value)
        return
    for child in children:
        if isinstance(child, Tensor):
            found.append(child)
        else:
            _collect(child, found)


def _children(value: Any) -> Sequence[Any] | None:
    """Returns what ``value`` is made of, in order; None if it is not looked into."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value
    if kind is dict:
        return list(value.values())
    if kind in _PLAIN or isinstance(value, PackedSequence):
        return None
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    if _is_record(value):
        return [getattr(value, name) for name in _field_names(value)]
    return None


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module))


def _field_names(record: Any) -> list[str]:
    """Names the fields that are set: those with ``init=False`` need not be."""
    return [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]


def _rebuilt(value: Any, children: list[Any]) -> Any:
    """A container like ``value`` that holds ``children``."""
    kind = type(value)
    if kind is list:
        return children
    if isinstance(value, tuple):
        return _rebuilt_tuple(value, children)
    if kind is dict:
        return dict(zip(value, children, strict=True))
    if isinstance(value, Mapping) and not isinstance(value, dict) and not hasattr(kind, "__copy__"):
        # A shallow copy of an unknown one might share its items with the original.
        return kind(dict(zip(value, children, strict=True)))
    changed = copy.copy(value)
    if isinstance(value, list):
        changed[:] = children
    elif isinstance(value, Mapping):
        for key, child in zip(value, children, strict=True):
            changed[key] = child
    else:
        for name, child in zip(_field_names(value), children, strict=True):
            object.__setattr__(changed, name, child)  # frozen ones, too
    return changed


def _rebuilt_tuple(value: tuple[Any, ...], children: list[Any]) -> tuple[Any, ...]:
    kind: Any = type(value)
    if kind is tuple:
        return tuple(children)
    if hasattr(kind, "_make"):  # a namedtuple
        return kind._make(children)
    if hasattr(kind, "n_fields"):  # a struct sequence, as torch.return_types has them
        return kind(children)
    changed = tuple.__new__(kind, children)
    if hasattr(value, "__dict__"):
        vars(changed).update(vars(value))
    return changed


def _match(
    values: Sequence[Any], place: str, names: Sequence[str], found: list[list[Tensor]]
) -> None:
    first = values[0]
    if isinstance(first, Tensor):
        for i, value in enumerate(values):
            if not isinstance(value, Tensor):
                differ(place, _kind(value), "a tensor", (names[i], names[0]), kind=TypeError)
            found[i].append(value)
        return
    children = _children(first)
    if children is None:
        _match_leaves(values, place, names)
        return
    columns = [children]
    for i in range(1, len(values)):
        columns.append(_children_like(first, values[i], place, (names[i], names[0])))
    for label, *group in zip(_labels(first), *columns, strict=True):
        _match(group, place + label, names, found)


def _children_like(first: Any, other: Any, place: str, who: tuple[str, str]) -> Sequence[Any]:
    """The children of ``other`` in the order of those of ``first``."""
    if not _same_kind(type(first), type(other)):
        differ(place, _kind(other), _kind(first), who, kind=TypeError)
    if isinstance(first, Mapping):
        if first.keys() != other.keys():
            got, expected = reprlib.repr(list(other)), reprlib.repr(list(first))
            differ(place, f"keys {got}", expected, who)
        return [other[key] for key in first]
    if isinstance(first, (tuple, list)):
        if len(first) != len(other):
            differ(place, f"{len(other)} items", str(len(first)), who)
        return other
    ours, theirs = _field_names(first), _field_names(other)
    if ours != theirs:
        differ(place, f"fields {theirs}", str(ours), who)
    return [getattr(other, name) for name in theirs]


def _same_kind(a: type, b: type) -> bool:
    """Says also yes to two of one name: a class in the body of forward is made in each call."""
    return a is b or (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


def _match_leaves(values: Sequence[Any], place: str, names: Sequence[str]) -> None:
    first = values[0]
    for i, value in enumerate(values):
        _refuse_packed(value)
        if value is first:
            continue
        who = names[i], names[0]
        if type(value) is not type(first):
            differ(place, _kind(value), _kind(first), who, kind=TypeError)
        if not (type(value) in _PLAIN or isinstance(value, (enum.Enum, type))):
            differ(
                place,
                f"{_kind(value)}, which cannot be compared,",
                "the same object",
                who,
                kind=TypeError,
            )
        if value != first and (value == value or first == first):  # NaN fits NaN
            got, expected = reprlib.repr(value), reprlib.repr(first)
            differ(place, got, expected, who)


def _labels(value: Any) -> Sequence[str]:
    """Returns what follows the name of a container to name each of its children."""
    if isinstance(value, Mapping):
        return [f"[{key!r}]" for key in value]
    if isinstance(value, (tuple, list)):
        fields: Sequence[str] | None = getattr(value, "_fields", None)
        if fields is not None and len(fields) == len(value):
            return [f".{name}" for name in fields]
        return [f"[{i}]" for i in range(len(value))]
    return [f".{name}" for name in _field_names(value)]


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return "a tensor" if isinstance(value, Tensor) else type(value).__name__


def differ(
    place: str,
    got: str,
    expected: str,
    who: tuple[str, str],
    *,
    next_step: str = _RETURN_ALIKE,
    kind: type[Exception] = ValueError,
) -> NoReturn:
    """Refuses what ``who[0]`` returned in that place, where ``who[1]`` returned something else."""
    refuse(
        f"got {got} for {place} from {who[0]}, expected {expected} as from {who[1]}",
        next_step,
        kind=kind,
    )


def _refuse_packed(value: Any) -> None:
    if isinstance(value, PackedSequence):
        refuse(
            "got a PackedSequence, expected tensors with the batch along one dimension",
            "Pack and unpack inside forward, with total_length= for pad_packed_sequence.",
            kind=TypeError,
        )
