"""Which optimizer or unit has sharded a parameter, and which module averages its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from trireme._C import Communicator, DeferredSync, Zero, ZeroCores
from trireme._core.joined_steps import JoinedSteps


class ShardedOptimizer(Optimizer):
    """Each rank owns shards of the parameters of such an optimizer.

    The names are private because users see the class that ZeRO makes of it.
    """

    stage: int
    """2 if gradients are sharded, too."""
    rank: int
    process_group: dist.ProcessGroup
    optim: Optimizer
    """The one that steps this rank's shards."""
    _places: dict[torch.Tensor, tuple[int, int]]
    """Says of a parameter the number of its core, and its index there."""
    _shards: dict[torch.Tensor, torch.Tensor]
    """Holds what this rank owns of a parameter, in the memory of that."""

    @property
    def _cores(self) -> list[Zero]:
        """Returns what holds the parameters. Raises RuntimeError if another optimizer has taken
        over."""
        raise NotImplementedError

    def _sync_hyperparameters(self) -> None:
        """Gives ``optim`` what was set in ``param_groups``."""
        raise NotImplementedError

    def _in_join(self) -> JoinedSteps | None:
        """Returns what tells ranks that have run out of inputs in a ``Join``, if this one has
        not."""
        raise NotImplementedError


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns what a parameter group of an optimizer says beside its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class AveragingModule(Protocol):
    """A module that averages the gradients of its parameters over a group."""

    process_group: dist.ProcessGroup


class ShardingUnit(Protocol):
    """What has sharded parameters over the ranks of a mesh."""

    def norm_over(self, param: Any) -> tuple[Communicator, int, torch.device] | None:
        """The ranks that have other parts of ``param``, how many of them have the same part, and
        the device on which they talk. None if every rank has all of it."""

    def in_join(self) -> JoinedSteps | None:
        """What tells ranks that have run out of inputs in a ``Join``, if this one has not."""

    def deferred_sync(self) -> DeferredSync:
        """Says to a pipeline how to hold back its averaging."""


@runtime_checkable
class StagedModule(Protocol):
    """A module of which each rank of a pipeline has other layers."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Those of this rank."""

    def norm_over_stages(self) -> Communicator:
        """The ranks that have its stages."""

    def later_copies(self) -> list[torch.Tensor]:
        """Parameters of this rank that others count."""

    def names_in_whole(self) -> dict[str, str]:
        """What parameters and buffers of this rank are called in the whole module, by their names
        here, where that is something else: what stages share has the name of the first."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """All ranks that have stages of it; None where all stages are in this process."""


@runtime_checkable
class KeepsElsewhere(Protocol):
    """A module whose tensors are in another process."""

    def _tensors_elsewhere(self) -> dict[str, torch.Tensor]:
        """Copies of them, by the names of its state dict."""

    def _put_elsewhere(self, tensors: dict[str, torch.Tensor]) -> None:
        """Writes them there."""


_modules = WeakIdKeyDictionary()


def optimizer_of(parameter: torch.Tensor) -> ShardedOptimizer | None:
    """The living optimizer that has claimed ``parameter``."""
    cores = ZeroCores.of(parameter)
    if cores is None or not hasattr(cores, "owner"):  # none has, or one of C++
        return None
    return cores.owner()


def note_averaging(parameters: Iterable[torch.Tensor], module: AveragingModule) -> None:
    """Says that ``module`` averages their gradients."""
    for parameter in parameters:
        _modules[parameter] = weakref.ref(module)


def averaging_module_of(parameter: torch.Tensor) -> AveragingModule | None:
    """The living module of ours that averages the gradient of ``parameter``."""
    found = _modules.get(parameter)
    return None if found is None else found()


class _OwnerOf:
    """A parameter holds it. In copies and pickles of that an empty set comes in its place, which
    ``torch.load(weights_only=True)`` takes."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        return set, ()


def note_unit(parameter: torch.Tensor, unit: ShardingUnit) -> None:
    """Says that ``unit`` has sharded it. An attribute: ``Module.to`` refuses parameters to which
    there are weak references."""
    parameter._trireme_unit = _OwnerOf(unit)  # type: ignore[attr-defined]


def unit_of(parameter: torch.Tensor) -> ShardingUnit | None:
    """The living unit of fully_shard that has sharded ``parameter``."""
    found = getattr(parameter, "_trireme_unit", None)
    return found.owner() if isinstance(found, _OwnerOf) else None


def note_table(parameter: torch.Tensor, table: Any) -> None:
    """Says that ``table`` of a parameter server keeps its values, or that none does."""
    if table is not None:
        parameter._trireme_table = _OwnerOf(table)  # type: ignore[attr-defined]
    elif hasattr(parameter, "_trireme_table"):
        del parameter._trireme_table


def table_of(parameter: torch.Tensor) -> Any:
    """The living table of a parameter server that keeps the values of ``parameter``, or None."""
    found = getattr(parameter, "_trireme_table", None)
    return found.owner() if isinstance(found, _OwnerOf) else None


def note_stages(parameters: Iterable[torch.Tensor], module: StagedModule) -> None:
    """Says that other ranks have other parameters of ``module``."""
    for parameter in parameters:
        parameter._trireme_stages = _OwnerOf(module)  # type: ignore[attr-defined]


def group_of_stages(module: object) -> dist.ProcessGroup | None:
    """The ranks that have stages of ``module``, if it is dealt out to ranks."""
    return module.process_group if isinstance(module, StagedModule) else None


def stages_of(parameter: torch.Tensor) -> StagedModule | None:
    """The living module of which ``parameter`` is one rank's."""
    found = getattr(parameter, "_trireme_stages", None)
    return found.owner() if isinstance(found, _OwnerOf) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, in its memory; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
