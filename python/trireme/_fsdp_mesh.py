"""The ranks among which a unit is sharded, those with the same shards, and who talks to whom."""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from trireme._C import Communicator, ParamGroup
from trireme._group_communicator import communicator_of

# Groups of the same ranks as another one, for what must not mix with its collectives.
_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
# Of all ranks of a mesh of two dimensions, by that of the first one.
_unions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class FsdpMesh:
    """A mesh of one dimension (sharded) or two (replicated, sharded), with its communicators.

    ``shard_communicator`` has the ranks among which parameters are sharded; gradients are
    scattered with it. ``gather_communicator`` has the same ranks, for what is gathered; None where
    nothing is. ``replicate_communicator`` has the ranks with the same shards, None without a second
    dimension; ``communicator`` has all of them.

    Collective over the ranks of the mesh when it is the first one of its process groups.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.device = _device_of(mesh)
        shard_group = mesh.get_group(mesh.ndim - 1)
        self.shard_communicator = communicator_of(shard_group)
        self.gathers = ParamGroup.gathers_over(self.shard_communicator, self.device)
        self.gather_communicator: Communicator | None = None
        if self.gathers and self.shard_communicator.world > 1:
            self.gather_communicator = communicator_of(_twin_of(shard_group))
        self.replicate_communicator: Communicator | None = None
        self.communicator = self.shard_communicator
        if mesh.ndim == 2:
            self.replicate_communicator = communicator_of(mesh.get_group(0))
            self.communicator = communicator_of(self.group)

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all ranks."""
        return self.mesh.get_group() if self.mesh.ndim == 1 else _union_of(self.mesh)

    @functools.cached_property
    def world(self) -> int:
        return self.mesh.size()

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Of a parameter that is sharded on ``dim``, if it is."""
        sharded: Placement = Replicate() if dim is None else Shard(dim)
        return (sharded,) if self.mesh.ndim == 1 else (Replicate(), sharded)

    def is_like(self, other: FsdpMesh) -> bool:
        """Whether units on both may hang under one root."""
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


def _twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    twin = _twins.get(group)
    if twin is None:
        twin = _twins[group] = _new_group(dist.get_process_group_ranks(group), group)
    return twin


def _union_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    first = mesh.get_group(0)
    union = _unions.get(first)
    if union is None:
        ranks = sorted(mesh.mesh.flatten().tolist())
        if ranks == list(range(dist.get_world_size())):
            union = dist.group.WORLD
        else:
            union = _new_group(ranks, first)
        assert union is not None
        _unions[first] = union
    return union


def _new_group(ranks: list[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Collective over ``ranks`` only."""
    made = dist.new_group(
        ranks,
        backend=str(dist.get_backend_config(like)),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
