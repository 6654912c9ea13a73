"""Which optimizer has sharded a parameter, and which module averages its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from trireme import _C

if TYPE_CHECKING:
    from trireme.ddp import DistributedDataParallel
    from trireme.zero import ZeroRedundancyOptimizer

_optimizers = WeakIdKeyDictionary()
_modules = WeakIdKeyDictionary()


def claim(
    parameters: Iterable[torch.Tensor],
    optimizer: ZeroRedundancyOptimizer,
    name_of: Callable[[torch.Tensor], str],
) -> None:
    """Says that ``optimizer`` shards them; ValueError if another one does."""
    claimed = list(parameters)
    for parameter in claimed:
        if optimizer_of(parameter) is not None:
            group = optimizer.process_group
            got = f"got '{name_of(parameter)}', which another ZeroRedundancyOptimizer holds"
            next_step = "Give each parameter to one optimizer, or delete the other one first."
            raise ValueError(
                _C.error_text("zero", got, next_step, rank=group.rank(), world=group.size())
            )
    for parameter in claimed:
        _optimizers[parameter] = weakref.ref(optimizer)


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
