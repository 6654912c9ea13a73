"""Which optimizer or unit has sharded a parameter, and which module averages its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from trireme._C import error_text

if TYPE_CHECKING:
    from trireme._fsdp_unit import FsdpUnit
    from trireme.ddp import DistributedDataParallel
    from trireme.zero import ZeroRedundancyOptimizer

_optimizers = WeakIdKeyDictionary()
_modules = WeakIdKeyDictionary()


def claim(
    parameters: Iterable[torch.Tensor],
    optimizer: ZeroRedundancyOptimizer,
    name_of: Callable[[torch.Tensor], str],
) -> None:
    """Says that ``optimizer`` shards them.

    Raises:
        ValueError: another one does, or a module averages them in a way that it cannot step with.
    """
    claimed = list(parameters)
    for parameter in claimed:
        _check_free(parameter, optimizer, name_of(parameter))
    for parameter in claimed:
        _optimizers[parameter] = weakref.ref(optimizer)


def _check_free(parameter: torch.Tensor, optimizer: ZeroRedundancyOptimizer, name: str) -> None:
    group = optimizer.process_group
    ddp = ddp_of(parameter)
    if optimizer_of(parameter) is not None:
        got = f"got '{name}', which another ZeroRedundancyOptimizer holds"
        next_step = "Give each parameter to one optimizer, or delete the other one first."
    elif ddp is not None and optimizer.stage == 2:
        got = f"got stage 2 for '{name}', which DistributedDataParallel averages already"
        next_step = "Use the plain module, or stage=1."
    elif ddp is not None and ddp.process_group != group:
        got = f"got '{name}', which DistributedDataParallel averages over another group"
        next_step = "Pass the same process_group to both."
    else:
        return
    raise ValueError(error_text("zero", got, next_step, rank=group.rank(), world=group.size()))


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Takes back ``claim``."""
    for parameter in parameters:
        _optimizers.pop(parameter, None)


def optimizer_of(parameter: torch.Tensor) -> ZeroRedundancyOptimizer | None:
    """The living optimizer that has claimed ``parameter``."""
    found = _optimizers.get(parameter)
    return None if found is None else found()


def note_ddp(parameters: Iterable[torch.Tensor], module: DistributedDataParallel) -> None:
    """Says that ``module`` averages their gradients."""
    for parameter in parameters:
        _modules[parameter] = weakref.ref(module)


def ddp_of(parameter: torch.Tensor) -> DistributedDataParallel | None:
    """The living module of ours that averages the gradient of ``parameter``."""
    found = _modules.get(parameter)
    return None if found is None else found()


class _UnitOf:
    """Held by a parameter, and left out of its copies and pickles, where an empty set, which
    ``torch.load(weights_only=True)`` takes, comes in its place."""

    def __init__(self, unit: FsdpUnit) -> None:
        self.unit = weakref.ref(unit)

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        return set, ()


def note_unit(parameter: torch.Tensor, unit: FsdpUnit) -> None:
    """Says that ``unit`` has sharded it. An attribute: ``Module.to`` refuses parameters to which
    there are weak references."""
    parameter._trireme_unit = _UnitOf(unit)  # type: ignore[attr-defined]


def unit_of(parameter: torch.Tensor) -> FsdpUnit | None:
    """The living unit of fully_shard that has sharded ``parameter``."""
    found = getattr(parameter, "_trireme_unit", None)
    return found.unit() if isinstance(found, _UnitOf) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, in its memory; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
