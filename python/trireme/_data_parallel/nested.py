"""Tensors in nested inputs and outputs: found, replaced, and matched between replicas.

Looked into is what `trireme._core.nested` looks into. Anything else is handed on as it is, tensors
in it included.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trireme._core import nested
from trireme._core.nested import PLAIN, children, children_like, field_names, labels
from trireme._data_parallel import refuse

_RETURN_ALIKE = (
    "Return the same structure for every part of a batch, and what depends on it as a tensor."
)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in ``value``, depth first: items in their order, fields in that of the class.

    Raises:
        TypeError: for a PackedSequence, whose rows are not along one dimension.
    """
    return nested.tensors_in(value, _unpacked)


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """``value`` with other tensors: the next of ``tensors`` for each, in the order of `tensors_in`.

    Containers are new ones of the same type, but empty ones, as all that is no tensor, are handed
    on by reference.
    """
    return nested.map_tensors(value, lambda _: next(tensors), lambda one: children(one) or None)


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
    return next(iter(nested.tensors_in(value)), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _unpacked(value: Any) -> Sequence[Any] | None:
    """The children of a value, which is no PackedSequence."""
    _refuse_packed(value)
    return children(value)


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
    held = _unpacked(first)
    if held is None:
        _match_leaves(values, place, names)
        return
    columns = [held]
    for i in range(1, len(values)):
        columns.append(_children_like(first, values[i], place, (names[i], names[0])))
    for label, *group in zip(labels(first), *columns, strict=True):
        _match(group, place + label, names, found)


def _children_like(first: Any, other: Any, place: str, who: tuple[str, str]) -> Sequence[Any]:
    """The children of ``other`` in the order of those of ``first``."""
    if not _same_kind(type(first), type(other)):
        differ(place, _kind(other), _kind(first), who, kind=TypeError)
    held = children_like(other, first)
    if held is None:
        got, expected = _difference(other, first)
        differ(place, got, expected, who)
    return held


def _difference(other: Any, first: Any) -> tuple[str, str]:
    if isinstance(first, Mapping):
        return f"keys {reprlib.repr(list(other))}", reprlib.repr(list(first))
    if isinstance(first, (tuple, list)):
        return f"{len(other)} items", str(len(first))
    return f"fields {field_names(other)}", str(field_names(first))


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
        if not (type(value) in PLAIN or isinstance(value, (enum.Enum, type))):
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
