"""Forwards of a pipeline in one process, whose loss is computed outside of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trireme import _C
from trireme._C import RowThreads
from trireme._pipeline.micro_batches import BatchCut, map_tensors, merge, tensors_in
from trireme._pipeline.stages import MicroBatches, StageCalls
from trireme._pipeline.values import put_together


def cut_for_pass(
    given: Any, keywords: Mapping[str, Any], chunks: int, dim: int
) -> tuple[int, Sequence[Any], dict[str, Sequence[Any]]]:
    """Returns how many micro-batches a batch has, fewer than ``chunks`` where it has fewer rows,
    and what each of them gets."""
    parts = {"the input": given, **keywords}
    count = max(1, min(chunks, BatchCut(parts, 1, dim).rows))
    cut = BatchCut(parts, count, dim)
    return count, cut.cut(given), {name: cut.cut(keyword) for name, keyword in keywords.items()}


def run_pass(
    rows: RowThreads,
    calls: Sequence[StageCalls],
    names: Sequence[str],
    inputs: Sequence[Any],
    keywords: Mapping[str, Sequence[Any]],
    dim: int,
) -> Any:
    """Returns what the last layer returns, put together, in the graph of the caller."""
    one = _C.PipelinePass(rows)
    asked = {name for call in calls for name in call.keywords}
    entered = [map_tensors(piece, one.enter) for piece in inputs]
    batch = MicroBatches([(piece,) for piece in entered], names)
    of_names = {**dict.fromkeys(names, entered), **keywords}
    batch.keywords = {
        name: [map_tensors(piece, one.enter) for piece in pieces] if name in keywords else pieces
        for name, pieces in of_names.items()
        if name in asked
    }

    def show(begins: bool) -> None:
        for call in calls:
            call.batch, call.failure = batch if begins else MicroBatches(), None

    show(True)
    try:
        outputs = one.forward([tensors_in(piece) for piece in entered], show)
    finally:
        show(False)
    values = [put_together((tensors, text) if text else tensors[0]) for tensors, text in outputs]
    return merge(values, dim)


def is_tensors(value: Any) -> bool:
    """Says whether a value is a tensor or has some."""
    return isinstance(value, Tensor) or bool(tensors_in(value))
