"""A batch cut into micro-batches, and outputs of micro-batches put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from trireme import _C
from trireme._core.nested import children, children_like, labels, map_tensors, rebuilt, tensors_in
from trireme._pipeline import refuse


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
            for tensor in tensors_in(value):
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
    if children(first) is not None:
        columns = _columns(outputs, where)
        merged = [
            merge(group, dim, where + label)
            for label, *group in zip(labels(first), *columns, strict=True)
        ]
        return rebuilt(first, merged)
    if any(output != first and not (output != output and first != first) for output in outputs):
        _refuse_merge(where, f"values {first!r} and others")
    return first


def _columns(outputs: Sequence[Any], where: str) -> list[Sequence[Any]]:
    """Returns what each output holds, all in the order of the first."""
    columns: list[Sequence[Any]] = []
    for output in outputs:
        held = children_like(output, outputs[0])
        if held is None:
            _refuse_merge(where, _difference(outputs))
        columns.append(held)
    return columns


def _difference(outputs: Sequence[Any]) -> str:
    if isinstance(outputs[0], tuple | list):
        return f"lengths {sorted({len(output) for output in outputs})}"
    return "keys" if isinstance(outputs[0], Mapping) else "fields"


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


def _refuse_merge(where: str, what: str) -> NoReturn:
    refuse(
        f"got outputs of micro-batches that cannot be put together: {where} has {what}",
        "Return tensors that are alike but for the rows, or pass a target for a loss.",
    )
