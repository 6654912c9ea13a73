"""Which optimizer or unit has sharded a parameter, and which module averages its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
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


class Claim:
    """Says that ``optimizer`` shards ``parameters``, which it may take over from another one, if it
    gets all that the other one has.

    Raises:
        ValueError: it gets some of them only, or a module averages them in a way that it cannot
            step with.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        optimizer: ZeroRedundancyOptimizer,
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        # By reference, so that an exception does not keep those who are not claimed from.
        self._before = {parameter: _optimizers.get(parameter) for parameter in parameters}
        for parameter in self._before:
            _check_averaged(parameter, optimizer, name_of(parameter))
            _check_all_given(parameter, self._before, optimizer, name_of(parameter))
        for parameter in self._before:
            _optimizers[parameter] = weakref.ref(optimizer)

    @property
    def parameters(self) -> Collection[torch.Tensor]:
        """Each once."""
        return self._before.keys()

    def undo(self) -> None:
        """Gives them back."""
        for parameter, other in self._before.items():
            if other is None:
                _optimizers.pop(parameter, None)
            else:
                _optimizers[parameter] = other

    def settle(self) -> None:
        """Those who had them before let go of them."""
        others = (before() for before in self._before.values() if before is not None)
        for other in {id(one): one for one in others if one is not None}.values():
            other._retire()
        self._before = dict.fromkeys(self._before)


def _check_averaged(parameter: torch.Tensor, optimizer: ZeroRedundancyOptimizer, name: str) -> None:
    group = optimizer.process_group
    ddp = ddp_of(parameter)
    if ddp is not None and optimizer.stage == 2:
        got = f"got stage 2 for '{name}', which DistributedDataParallel averages already"
        next_step = "Use the plain module, or stage=1."
    elif ddp is not None and ddp.process_group != group:
        got = f"got '{name}', which DistributedDataParallel averages over another group"
        next_step = "Pass the same process_group to both."
    else:
        return
    raise ValueError(error_text("zero", got, next_step, rank=group.rank(), world=group.size()))


def _check_all_given(
    parameter: torch.Tensor,
    given: Collection[torch.Tensor],
    optimizer: ZeroRedundancyOptimizer,
    name: str,
) -> None:
    other = optimizer_of(parameter)
    if other is None:
        return
    left = [other._names[one] for one in other._places if one not in given]
    if not left:
        return
    got = (
        f"got '{name}', which another ZeroRedundancyOptimizer holds, without '{left[0]}'"
        + (f" and {len(left) - 1} more of its parameters" if len(left) > 1 else "")
        + ", expected all of them or none"
    )
    next_step = "Give all of them to take over from it, or delete it first."
    group = optimizer.process_group
    raise ValueError(error_text("zero", got, next_step, rank=group.rank(), world=group.size()))


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
