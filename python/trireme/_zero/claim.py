"""An optimizer claims the parameters that it shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable

import torch

from trireme._core.owners import (
    ShardedOptimizer,
    averaging_module_of,
    note_optimizer,
    optimizer_of,
)
from trireme._zero import refuse


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
        optimizer: ShardedOptimizer,
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        # Weak references, so that an exception does not keep those who are not claimed from.
        self._before = {parameter: _holder_of(parameter) for parameter in parameters}
        for parameter in self._before:
            _check_averaged(parameter, optimizer, name_of(parameter))
            _check_all_given(parameter, self._before, optimizer, name_of(parameter))
        for parameter in self._before:
            note_optimizer(parameter, optimizer)

    @property
    def parameters(self) -> Collection[torch.Tensor]:
        """Each claimed parameter once."""
        return self._before.keys()

    def undo(self) -> None:
        """Gives the parameters back."""
        for parameter, other in self._before.items():
            note_optimizer(parameter, None if other is None else other())

    def settle(self) -> None:
        """Those who had them before let go of them."""
        others = (before() for before in self._before.values() if before is not None)
        for other in {id(other): other for other in others if other is not None}.values():
            other._retire()
        self._before = dict.fromkeys(self._before)


def _holder_of(parameter: torch.Tensor) -> weakref.ref[ShardedOptimizer] | None:
    holder = optimizer_of(parameter)
    return None if holder is None else weakref.ref(holder)


def _check_averaged(parameter: torch.Tensor, optimizer: ShardedOptimizer, name: str) -> None:
    module = averaging_module_of(parameter)
    if module is None:
        return
    if optimizer.stage == 2:
        refuse(
            f"got stage 2 for '{name}', which DistributedDataParallel averages already",
            "Use the plain module, or stage=1.",
            optimizer.process_group,
        )
    if module.process_group != optimizer.process_group:
        refuse(
            f"got '{name}', which DistributedDataParallel averages over another group",
            "Pass the same process_group to both.",
            optimizer.process_group,
        )


def _check_all_given(
    parameter: torch.Tensor,
    given: Collection[torch.Tensor],
    optimizer: ShardedOptimizer,
    name: str,
) -> None:
    other = optimizer_of(parameter)
    if other is None:
        return
    left = [other._names[place] for place in other._places if place not in given]
    if not left:
        return
    refuse(
        f"got '{name}', which another ZeroRedundancyOptimizer holds, without '{left[0]}'"
        + (f" and {len(left) - 1} more of its parameters" if len(left) > 1 else "")
        + ", expected all of them or none",
        "Give all of them to take over from it, or delete it first.",
        optimizer.process_group,
    )
