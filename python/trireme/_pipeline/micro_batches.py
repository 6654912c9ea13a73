"""A batch cut into micro-batches, and outputs of micro-batches put together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trireme import _C
from trireme._pipeline import refuse


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns ``value`` with its tensors changed.

    Looks into tuples, lists, dicts, named tuples and dataclasses; all else stays as it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)._make(map_tensors(item, change) for item in value)  # type: ignore[attr-defined]
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # keeps a subclass, and what its default is
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, map_tensors(getattr(value, field.name), change))
        return made
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors that :func:`map_tensors` changes."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


class BatchCut:
    """Says how the rows of a batch are dealt out to micro-batches, as torch.tensor_split() does.

    Their numbers differ by one at most; the first ones have more.

    Raises:
        ValueError: tensors of different lengths, or fewer rows than micro-batches.
    """

    def __init__(self, batch: Mapping[str, Any], chunks: int, dim: int) -> None:
        self.chunks, self._dim = chunks, dim
        self.versions = _C.BatchVersions()
        """Those of what was cut, so that micro-batches may be changed in place."""
        self._cut: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        rows: dict[int, str] = {}
        for name, value in batch.items():
            for tensor in [value] if isinstance(value, Tensor) else tensors_in(value):
                if tensor.dim() > 0:  # a number goes to every micro-batch
                    rows.setdefault(self._rows_of(tensor, name), name)
        if len(rows) != 1:
            said = ", ".join(f"{count} in {name}" for count, name in rows.items()) or "no tensor"
            refuse(
                f"got a batch of different numbers of rows along dim {dim}: {said}",
                "Give each tensor of the batch as many.",
            )
        (self.rows,) = rows
        if self.rows < chunks:
            refuse(
                f"got a batch of {self.rows} rows for {chunks} micro-batches, expected at least "
                "one for each",
                "Give a larger batch, or fewer chunks.",
            )

    def _rows_of(self, tensor: Tensor, name: str) -> int:
        if not -tensor.dim() <= self._dim < tensor.dim():
            got = f"got {tensor.dim()} dims in {name}, expected a tensor with dim {self._dim}"
            refuse(got, "Pass dim= to trireme.Pipeline, or another tensor.")
        return tensor.size(self._dim)

    def cut(self, value: Any) -> Sequence[Any]:
        """Returns what of ``value`` each micro-batch gets."""
        if self.chunks == 1:
            return (value,)
        if isinstance(value, Tensor):
            return self._pieces(value)

        def piece(number: int) -> Any:
            return map_tensors(value, lambda tensor: self._pieces(tensor)[number])

        return [piece(number) for number in range(self.chunks)]

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        if tensor.dim() == 0:
            return [tensor] * self.chunks
        if id(tensor) not in self._cut:  # layers that get the same tensor see each other's changes
            pieces: Sequence[Tensor] = torch.tensor_split(tensor, self.chunks, self._dim)
            if not tensor.requires_grad:
                apart = self.versions.apart
                pieces = [apart(piece, number) for number, piece in enumerate(pieces)]
            self._cut[id(tensor)] = (tensor, pieces)
        return self._cut[id(tensor)][1]


def merge(outputs: Sequence[Any], dim: int, where: str = "the output") -> Any:
    """Puts what micro-batches returned together: tensors along ``dim``, in values of any depth.

    Raises:
        ValueError: they are not alike.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if any(type(output) is not type(first) for output in outputs):
        names = ", ".join(sorted({type(output).__name__ for output in outputs}))
        _refuse_merge(where, f"types {names}")
    if isinstance(first, Tensor):
        return _merge_tensors(outputs, dim, where)
    if isinstance(first, tuple | list):
        if any(len(output) != len(first) for output in outputs):
            _refuse_merge(where, f"lengths {sorted({len(output) for output in outputs})}")
        merged = [
            merge([output[i] for output in outputs], dim, f"{where}[{i}]")
            for i in range(len(first))
        ]
        make: Any = type(first)
        return make._make(merged) if hasattr(first, "_fields") else make(merged)
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            _refuse_merge(where, "keys")
        changed = copy.copy(first)
        for key in first:
            changed[key] = merge([output[key] for output in outputs], dim, f"{where}[{key!r}]")
        return changed
    if dataclasses.is_dataclass(first):
        made = copy.copy(first)
        for field in dataclasses.fields(first):
            parts = [getattr(output, field.name) for output in outputs]
            object.__setattr__(made, field.name, merge(parts, dim, f"{where}.{field.name}"))
        return made
    if any(output != first and not (output != output and first != first) for output in outputs):
        _refuse_merge(where, f"values {first!r} and others")
    return first


def _merge_tensors(outputs: Sequence[Tensor], dim: int, where: str) -> Tensor:
    first = outputs[0]
    if first.dim() == 0:
        _refuse_merge(where, "0 dims, which cannot be put side by side")
    if any(output.dtype != first.dtype or output.device != first.device for output in outputs):
        _refuse_merge(where, "dtypes or devices")
    try:
        return torch.cat(list(outputs), dim)
    except (RuntimeError, IndexError):
        _refuse_merge(where, f"sizes {sorted({tuple(output.shape) for output in outputs})}")
        raise


def _refuse_merge(where: str, what: str) -> None:
    refuse(
        f"got outputs of micro-batches that cannot be put together: {where} has {what}",
        "Return tensors that are alike but for the rows, or pass a target for a loss.",
    )
