"""Forwards of a pipeline in one process, whose loss is computed outside of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from trireme import _C
from trireme._C import BatchVersions, CallTurn, PipelinePass, PipelineThreads
from trireme._core.nested import map_tensors, tensors_in
from trireme._pipeline.micro_batches import BatchCut
from trireme._pipeline.stages import MicroBatches, StageCalls
from trireme._pipeline.values import one_or_text, put_together


@dataclass
class PassInputs:
    """What the micro-batches of a pass get."""

    inputs: Sequence[Any]
    keywords: dict[str, Sequence[Any]]
    versions: BatchVersions

    def enter(self, one: PipelinePass, pieces: Sequence[Any]) -> list[Any]:
        """Returns what the stages of the pass are to be given for these."""
        return [
            map_tensors(piece, partial(one.enter, micro_batch=number))
            for number, piece in enumerate(pieces)
        ]


def cut_for_pass(given: Any, keywords: Mapping[str, Any], chunks: int, dim: int) -> PassInputs:
    """Cuts a batch, into fewer micro-batches than ``chunks`` where it has fewer rows."""
    parts = {"the input": given, **keywords}
    count = max(1, min(chunks, BatchCut(parts, 1, dim).rows))
    cut = BatchCut(parts, count, dim)
    of_keywords = {name: cut.cut(keyword) for name, keyword in keywords.items()}
    return PassInputs(cut.cut(given), of_keywords, cut.versions)


def run_pass(
    threads: PipelineThreads,
    calls: Sequence[StageCalls],
    names: Sequence[str],
    given: PassInputs,
    turn: CallTurn,
) -> list[Any]:
    """Returns what the last layer returns for each micro-batch, in the graph of the caller. Its
    backward is a call as any other, for which ``turn`` is taken."""
    one = _C.PipelinePass(threads, given.versions)
    asked = {name for call in calls for name in call.keywords}
    entered = given.enter(one, given.inputs)
    batch = MicroBatches([(piece,) for piece in entered], names)
    batch.keywords = dict.fromkeys(asked.intersection(names), entered)
    for name in asked & given.keywords.keys():
        batch.keywords[name] = given.enter(one, given.keywords[name])

    def hand_over(begins: bool) -> None:
        for call in calls:
            call.begin(batch if begins else MicroBatches())

    hand_over(True)
    inputs = [tensors_in(piece) for piece in entered]
    outputs = one.forward(inputs, hand_over, turn, threads)
    return [put_together(one_or_text(*output)) for output in outputs]


def is_tensors(value: Any) -> bool:
    """Says whether a value is a tensor or has some."""
    return isinstance(value, Tensor) or bool(tensors_in(value))
