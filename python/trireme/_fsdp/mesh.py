"""The ranks among which a unit is sharded, those with the same shards, and who talks to whom."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from trireme._C import Communicator, ParamGroup
from trireme._core.group_communicator import communicator_of
from trireme._core.meshes import group_over, new_group_like, ranks_of

if TYPE_CHECKING:
    from trireme._fsdp.mesh_dims import FullMesh

# Groups that were made of another one's ranks, all or some, by what they are for.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()
# What must not mix with the collectives of a group.
_TWIN = "twin"
# Sums over replicas: other units may gather over the first twin meanwhile.
_REPLICA_TWIN = "twin for replicas"


class FsdpMesh:
    """A mesh of one dimension (sharded) or two (replicated, sharded), with its communicators.

    ``shard_communicator`` has the ranks among which parameters are sharded; gradients are
    scattered with it, over ``shard_group``. ``gather_communicator`` has the same ranks, over
    ``gather_group``, for what is gathered; None where nothing is. ``replicate_communicator`` has
    the ranks with the same shards, None without a second dimension; ``communicator`` has all of
    them.

    ``full`` is the mesh of all dimensions where parameters are DTensors on that (dp_mesh_dims). If
    it shards none of them, ``mesh`` is the replicated dimension, and each rank shares its
    parameters with itself.

    Collective over the ranks of the mesh when it is the first one of its process groups.
    """

    def __init__(self, mesh: DeviceMesh, full: FullMesh | None = None) -> None:
        self.mesh = mesh
        self.full = full
        self.device = _device_of(mesh)
        self._joined: dict[tuple[DeviceMesh, ...], DeviceMesh] = {}
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        only_replicates = full is not None and not full.shard_dims
        shard_group = mesh.get_group(mesh.ndim - 1)
        if only_replicates:
            shard_group = _group_from(mesh.get_group(0), "alone", [dist.get_rank()])
        self.shard_group = shard_group
        self.shard_communicator = communicator_of(shard_group)
        self.gathers = ParamGroup.gathers_over(self.shard_communicator, self.device)
        self.gather_group: dist.ProcessGroup | None = None
        self.gather_communicator: Communicator | None = None
        if self.gathers and self.shard_communicator.world > 1:
            self.gather_group = _group_from(shard_group, _TWIN)
            self.gather_communicator = communicator_of(self.gather_group)
        self.replicate_communicator: Communicator | None = None
        self.communicator = self.shard_communicator
        if mesh.ndim == 2 or only_replicates:
            # Not the mesh's own: ranks come to the user's collectives there at other times.
            self.replicate_communicator = communicator_of(
                _group_from(mesh.get_group(0), _REPLICA_TWIN)
            )
            self.communicator = communicator_of(self.group)

    def neighbours(self, count: int) -> Communicator | None:
        """Connects the ``count`` ranks around this one that share parameters: the first ``count``
        of them, the next, and so on. None for 0, and where nothing is gathered. Collective over
        them when they are asked for the first time."""
        if count == 0 or not self.gathers:
            return None
        return communicator_of(_neighbours_in(self.shard_group, count))

    @property
    def group(self) -> dist.ProcessGroup:
        """Has all ranks."""
        return group_over([self.mesh])

    @functools.cached_property
    def world(self) -> int:
        return self.mesh.size()

    @functools.cached_property
    def ranks(self) -> frozenset[int]:
        """All of them, by their numbers in the run."""
        return frozenset(ranks_of(self.mesh))

    @functools.cached_property
    def twin_communicator(self) -> Communicator:
        """Has all ranks, for what must not mix with the collectives of ``communicator``. Collective
        when it is asked for the first time."""
        return communicator_of(_group_from(self.group, _TWIN))

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Says how a parameter lies that is sharded on ``dim``, if it is."""
        sharded: Placement = Replicate() if dim is None else Shard(dim)
        return (sharded,) if self.mesh.ndim == 1 else (Replicate(), sharded)

    def joined_with(self, model_mesh: DeviceMesh) -> DeviceMesh:
        """A mesh of the dimensions of both."""
        return self.join([self.mesh, model_mesh])

    def join(self, meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """Puts them together, once for each list.

        Raises:
            RuntimeError, TypeError: they are not cut from one mesh with names.
        """
        key = tuple(meshes)
        if key not in self._joined:
            self._joined[key] = DeviceMesh._concatenate(list(meshes))
        return self._joined[key]

    def communicator_over(self, mesh: DeviceMesh, dims: Iterable[int]) -> Communicator:
        """Connects the ranks that differ from this one along ``dims`` of ``mesh`` only. Collective
        over them when they are asked for the first time."""
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        along = set(dims)
        place = tuple(slice(None) if i in along else at for i, at in enumerate(coordinate))
        ranks = tuple(sorted(mesh.mesh[place].flatten().tolist()))
        if len(ranks) == self.shard_communicator.world:
            return self.shard_communicator  # along which every parameter with dimensions is cut
        if ranks not in self._communicators:
            made = new_group_like(list(ranks), self.mesh.get_group(self.mesh.ndim - 1))
            self._communicators[ranks] = communicator_of(made)
        return self._communicators[ranks]

    def is_like(self, other: FsdpMesh) -> bool:
        """Whether gradients of units on both may travel together."""
        return (
            self.shard_communicator is other.shard_communicator
            and self.replicate_communicator is other.replicate_communicator
            and self.device == other.device
        )


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    handle = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, handle.current_device())


def _group_from(
    group: dist.ProcessGroup, purpose: str, ranks: list[int] | None = None
) -> dist.ProcessGroup:
    """Returns a group of ``ranks``, by default all of ``group``. Collective over them when it is
    asked for the first time."""
    made = _made.setdefault(group, {})
    if purpose not in made:
        made[purpose] = new_group_like(ranks or dist.get_process_group_ranks(group), group)
    return made[purpose]


def _neighbours_in(group: dist.ProcessGroup, count: int) -> dist.ProcessGroup:
    first = dist.get_rank(group) // count * count
    ranks = dist.get_process_group_ranks(group)[first : first + count]
    return _group_from(group, f"{count} neighbours", ranks)
