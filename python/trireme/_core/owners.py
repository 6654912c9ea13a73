"""Which optimizer or unit has sharded a parameter, and which module averages its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeGuard, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

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
class FreezesLayers(Protocol):
    """A module that freezes its layers itself, and goes on with that from a checkpoint."""

    def _freeze_state(self) -> dict[str, Any]:
        """``layers``, names; ``frozen``, how many of them; ``history``, numbers. The same on all
        ranks."""

    def _load_freeze_state(self, state: dict[str, Any]) -> None:
        """Freezes as many layers as such a state says."""


class KeepsElsewhere(Protocol):
    """A module whose tensors are in another process."""

    def _tensors_elsewhere(self) -> dict[str, torch.Tensor]:
        """Copies of them, by the names of its state dict."""

    def _put_elsewhere(self, tensors: dict[str, torch.Tensor]) -> None:
        """Writes them there."""


def keeps_elsewhere(module: object) -> TypeGuard[KeepsElsewhere]:
    """As isinstance, which takes microseconds for a Protocol, and is asked of each module."""
    return any("_tensors_elsewhere" in kind.__dict__ for kind in type(module).__mro__)


T = TypeVar("T")


class _Owner(Generic[T]):
    """What a parameter holds of who owns it. In copies and pickles of the parameter an empty set
    comes in its place, which ``torch.load(weights_only=True)`` takes."""

    def __init__(self, owner: T) -> None:
        self.get = weakref.ref(owner)

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        return set, ()


class _Role(Generic[T]):
    """Which living object has one role for a parameter.

    With ``attribute`` the parameter holds it: ``Module.to`` swaps DTensors, which torch refuses
    where there are weak references to one. Without, there are such references, so that torch
    refuses to swap what must stay where it is.
    """

    def __init__(self, attribute: str = "") -> None:
        self._attribute = attribute
        self._owners = WeakIdKeyDictionary()

    def note(self, parameter: torch.Tensor, owner: T | None) -> None:
        """Says that ``owner`` has the role, or that none has."""
        if self._attribute and owner is not None:
            setattr(parameter, self._attribute, _Owner(owner))
        elif self._attribute and hasattr(parameter, self._attribute):
            delattr(parameter, self._attribute)
        elif owner is not None:
            self._owners[parameter] = _Owner(owner)
        else:
            self._owners.pop(parameter, None)

    def note_all(self, parameters: Iterable[torch.Tensor], owner: T) -> None:
        """Says that ``owner`` has the role for each of them."""
        for parameter in parameters:
            self.note(parameter, owner)

    def of(self, parameter: torch.Tensor) -> T | None:
        """Returns who has the role, if there is one."""
        found = (
            getattr(parameter, self._attribute, None)
            if self._attribute
            else self._owners.get(parameter)
        )
        return found.get() if isinstance(found, _Owner) else None


_modules = _Role[AveragingModule]()
_units = _Role[ShardingUnit]("_trireme_unit")
_tables = _Role[Any]("_trireme_table")
_stages = _Role[StagedModule]("_trireme_stages")

note_averaging, averaging_module_of = _modules.note_all, _modules.of
"""Which module of ours averages its gradient."""
note_unit, unit_of = _units.note, _units.of
"""Which unit of fully_shard has sharded it."""
note_table, table_of = _tables.note, _tables.of
"""Which table of a parameter server keeps its values."""
note_stages, stages_of = _stages.note_all, _stages.of
"""Of which module it is one rank's: other ranks have other parameters."""


_optimizers: WeakKeyDictionary[ZeroCores, weakref.ref[ShardedOptimizer]] = WeakKeyDictionary()


def note_optimizer(cores: ZeroCores, optimizer: ShardedOptimizer) -> None:
    """Says that ``cores`` are those of ``optimizer``."""
    _optimizers[cores] = weakref.ref(optimizer)


def optimizer_of(parameter: torch.Tensor) -> ShardedOptimizer | None:
    """The living optimizer that shards ``parameter``."""
    cores = ZeroCores.of(parameter)
    found = None if cores is None else _optimizers.get(cores)
    return None if found is None else found()


def group_of_stages(module: object) -> dist.ProcessGroup | None:
    """The ranks that have stages of ``module``, if it is dealt out to ranks."""
    return module.process_group if isinstance(module, StagedModule) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, in its memory; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
