"""What ``DistributedOptimizer`` is given: what it refuses."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from trireme.horovod.compression import Compression
from trireme.horovod.errors import refuse
from trireme.horovod.functions import check_adasum
from trireme.horovod.process_sets import ProcessSet, id_of
from trireme.horovod.reductions import Adasum, Average, ReduceOp, Sum, known_op

Names = Iterable[tuple[str, torch.Tensor]]

SENT_AS = {
    Compression.none: None,
    Compression.fp16: torch.float16,
    Compression.bf16: torch.bfloat16,
}


def parameters_of(optimizer: Optimizer) -> dict[torch.Tensor, tuple[int, int]]:
    """Returns the parameters with their places: group, and number in it."""
    return {
        one: (i, j)
        for i, group in enumerate(optimizer.param_groups)
        for j, one in enumerate(group["params"])
    }


def checked_op(op: Any, predivide_factor: float, process_set: ProcessSet) -> ReduceOp:
    id_of(process_set)
    chosen = known_op(op)
    if chosen not in (Average, Sum, Adasum):
        refuse(f"got op={chosen.name}, expected Average, Sum or Adasum", "Pass hvd.Average.")
    check_adasum(chosen, process_set)
    if predivide_factor != 1.0 and chosen != Average:
        got = "got gradient_predivide_factor beside another op than Average"
        refuse(got, "Leave one of them out.")
    return chosen


def check_passes(passes: Any) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        got = f"got backward_passes_per_step={passes!r}, expected 1 or more"
        refuse(got, "Pass how many backwards a step has.")


def check_compression(compression: Any) -> None:
    if compression not in SENT_AS:
        got = f"got {compression!r} as compression, expected Compression.none, fp16 or bf16"
        refuse(got, "A compressor of your own works in hvd.allreduce().")


def chosen_groups(num_groups: int, groups: Any) -> Any:
    if num_groups != 0:
        text = (
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0."
        )
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return num_groups if groups is None else groups
    return groups


def check_groups(groups: Any) -> None:
    """Refuses what Horovod refuses. Gradients travel in buckets, whatever the groups are."""
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            got = f"got groups={groups}, expected 0 or more, or lists of parameters"
            refuse(got, "Leave groups out.")
        return
    if not isinstance(groups, list | tuple):
        got = f"got {type(groups).__name__} as groups, expected a number or lists of parameters"
        refuse(got, "Leave groups out.")
    seen: set[int] = set()
    for one in itertools.chain.from_iterable(groups):
        if not isinstance(one, torch.Tensor):
            got = f"got {type(one).__name__} in groups, expected parameters"
            refuse(got, "Leave groups out.")
        if id(one) in seen:
            refuse("got a parameter twice in groups, expected it once", "Leave groups out.")
        seen.add(id(one))


def checked_names(
    optimizer: Optimizer, named_parameters: Names | None
) -> dict[torch.Tensor, str] | None:
    if named_parameters is None:
        return None
    given = list(named_parameters)
    if any(not isinstance(one, tuple) or len(one) != 2 for one in given):
        got = "got named_parameters that are no tuples (name, parameter)"
        refuse(got, "Pass model.named_parameters().")
    doubled = [name for name, count in Counter(name for name, _ in given).items() if count > 1]
    if doubled:
        got = f"got parameter names more than once: {', '.join(map(repr, doubled))}"
        refuse(got, "Parameter names in named_parameters must be unique.")
    named = {parameter: name for name, parameter in given}
    missing = [place for one, place in parameters_of(optimizer).items() if one not in named]
    if missing:
        places = ", ".join(f"{j} of group {i}" for i, j in missing)
        got = f"got named_parameters without parameters of the optimizer: {places}"
        refuse(got, "Name all of them, or leave named_parameters out.")
    return named
