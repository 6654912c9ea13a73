"""What step() of torch's schedules is given, cut into micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    split_args_kwargs_into_chunks,
)

from trireme._C import BatchVersions
from trireme._core.nested import map_tensors, tensors_in
from trireme._pipeline import refuse


@dataclass(frozen=True)
class StepArguments:
    """What a caller gave: whole batches, or micro-batches."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    arg_mbs: Any
    kwarg_mbs: Any
    target_mbs: Any

    @property
    def has_target(self) -> bool:
        """Whether there is one, in either form."""
        return self.target is not None or self.target_mbs is not None


@dataclass(frozen=True)
class ChunkSpecs:
    """Says how batches are cut."""

    chunks: int
    args: tuple[TensorChunkSpec, ...] | None
    kwargs: dict[str, TensorChunkSpec] | None


Cut = tuple[list[tuple[Any, ...]], list[dict[str, Any]], list[Any] | None]


def cut_step(given: StepArguments, specs: ChunkSpecs, versions: BatchVersions) -> Cut:
    """Returns positional inputs, keywords and targets by micro-batch; targets None for none.
    ``versions`` become those of a batch that is cut here.

    Raises:
        ValueError: whole batches beside micro-batches; not one per micro-batch.
        TypeError: micro-batches that are no lists, of tuples and dicts.
    """
    if given.arg_mbs is None and given.kwarg_mbs is None and given.target_mbs is None:
        return _cut_batch(given, specs, versions)
    beside = [
        ("positional inputs", bool(given.args), "arg_mbs"),
        (f"'{next(iter(given.kwargs), '')}'", bool(given.kwargs), "kwarg_mbs"),
        ("target", given.target is not None, "target_mbs"),
    ]
    for what, is_given, name in beside:
        if is_given:
            refuse(f"got {what} of a whole batch beside micro-batches", f"Pass it in {name}=.")
    arg_mbs = _listed("arg_mbs", given.arg_mbs, specs.chunks, tuple)
    kwarg_mbs = _listed("kwarg_mbs", given.kwarg_mbs, specs.chunks, dict)
    target_mbs = _listed("target_mbs", given.target_mbs, specs.chunks, None)
    return (
        [()] * specs.chunks if arg_mbs is None else arg_mbs,
        [{}] * specs.chunks if kwarg_mbs is None else kwarg_mbs,
        target_mbs,
    )


def _cut_batch(given: StepArguments, specs: ChunkSpecs, versions: BatchVersions) -> Cut:
    args: list[tuple[Any, ...]] = [()] * specs.chunks
    kwargs: list[dict[str, Any]] = [{}] * specs.chunks
    if given.args or given.kwargs:
        args, kwargs = split_args_kwargs_into_chunks(
            given.args, given.kwargs, specs.chunks, specs.args, specs.kwargs
        )
        _expect_count("the batch", args, specs.chunks)
    targets: list[Any] | None = None
    if given.target is not None:
        targets, _ = split_args_kwargs_into_chunks((given.target,), None, specs.chunks)
        _expect_count("the target", targets, specs.chunks)
        targets = [target for (target,) in targets]
    parts = zip(args, kwargs, targets or [None] * specs.chunks, strict=True)
    apart = _apart(list(parts), versions)
    args, kwargs = [one for one, _, _ in apart], [one for _, one, _ in apart]
    return args, kwargs, None if targets is None else [one for _, _, one in apart]


def _apart(parts: list[Any], versions: BatchVersions) -> list[Any]:
    """Lets micro-batches be changed in place, but for what several of them have."""
    found = Counter(number for part in parts for number in set(map(id, tensors_in(part))))

    def own(number: int, tensor: Tensor) -> Tensor:
        is_piece = tensor._is_view() and not tensor.requires_grad and found[id(tensor)] == 1
        return versions.apart(tensor, number) if is_piece else tensor

    return [map_tensors(part, partial(own, number)) for number, part in enumerate(parts)]


def _expect_count(what: str, chunks: Sequence[Any], expected: int) -> None:
    if len(chunks) != expected:
        got = f"got {len(chunks)} chunks of {what}, expected {expected} micro-batches"
        refuse(got, "Give one row or more for each, or make the schedule for fewer.")


def _listed(name: str, given: Any, chunks: int, kind: type | None) -> list[Any] | None:
    if given is None:
        return None
    if not isinstance(given, list):
        got = f"got a {type(given).__name__} as {name}, expected a list"
        refuse(got, "List the micro-batches.", kind=TypeError)
    _expect_count(name, given, chunks)
    for number, value in enumerate(given):
        if kind is not None and not isinstance(value, kind):
            got = f"got a {type(value).__name__} as {name}[{number}], expected a {kind.__name__}"
            refuse(got, "Put the inputs of a micro-batch into one.", kind=TypeError)
    return given
