"""What meshes and placements of DTensors say: who is on them, and what they cut."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# Groups of all ranks of several dimensions or meshes, by the group of the first one.
_unions: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


# What a mesh computes whenever it is asked.
_ranks: WeakKeyDictionary[DeviceMesh, list[int]] = WeakKeyDictionary()


def is_cut(placement: Placement, dim: int | None = None) -> bool:
    """Whether ``placement`` shards a tensor: along ``dim``, if that is given."""
    return isinstance(placement, (Shard, _StridedShard)) and dim in (None, placement.dim)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """All ranks on ``mesh``, by their numbers in the run."""
    ranks = _ranks.get(mesh)
    if ranks is None:
        ranks = _ranks[mesh] = mesh.mesh.flatten().tolist()
    return ranks


def group_over(meshes: Sequence[DeviceMesh]) -> dist.ProcessGroup:
    """The group of all ranks that are on one of ``meshes``. Collective over these when they are
    asked for the first time."""
    ranks = tuple(sorted({rank for mesh in meshes for rank in ranks_of(mesh)}))
    for mesh in meshes:
        if mesh.ndim == 1 and mesh.size() == len(ranks):
            return mesh.get_group()
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD  # not kept: it may be `first`, which would then live for ever
        assert world is not None
        return world
    first = meshes[0].get_group(0)
    unions = _unions.setdefault(first, {})
    if ranks not in unions:
        unions[ranks] = new_group_like(list(ranks), first)
    return unions[ranks]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Says how long the ranks of ``group`` wait for each other; None if its engine does not say."""
    engine = group._get_backend(group._device_types[0])
    return getattr(getattr(engine, "options", None), "_timeout", None)


def new_group_like(ranks: list[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of ``ranks`` with the engine and the timeout of ``like``. Collective over ``ranks``
    only."""
    made = dist.new_group(
        ranks,
        timeout=timeout_of(like),
        backend=str(dist.get_backend_config(like)),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
