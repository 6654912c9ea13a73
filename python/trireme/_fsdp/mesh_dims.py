"""dp_mesh_dims: which dimensions of a mesh of all of them are fully_shard's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh

from trireme._fsdp import refuse


@dataclass(frozen=True)
class FullMesh:
    """The mesh on which parameters are DTensors, and which of its dimensions are data parallel."""

    mesh: DeviceMesh
    shard_dims: tuple[int, ...]
    replicate_dims: tuple[int, ...]

    @property
    def data_dims(self) -> tuple[int, ...]:
        return (*self.shard_dims, *self.replicate_dims)

    def name(self, index: int) -> str:
        names = self.mesh.mesh_dim_names
        assert names is not None
        return names[index]


def full_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any) -> FullMesh:
    """``mesh`` as ``dp_mesh_dims`` describes it.

    Raises:
        NotImplementedError: the installed torch has no dp_mesh_dims.
        TypeError, ValueError: it does not fit.
    """
    kind = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
    if kind is None:
        refuse(
            f"got dp_mesh_dims with torch {torch.__version__}, which has none",
            "Leave it out, and pass mesh[names] of the data parallel dimensions as mesh.",
            kind=NotImplementedError,
        )
    if not isinstance(dp_mesh_dims, kind):
        got = f"got {type(dp_mesh_dims).__name__} as dp_mesh_dims"
        refuse(got, "Pass torch.distributed.fsdp.DataParallelMeshDims.", kind=TypeError)
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
        refuse(
            f"got {mesh} as mesh, expected one with names, since dp_mesh_dims is given",
            "Use init_device_mesh with mesh_dim_names.",
        )
    names = mesh.mesh_dim_names

    def index_of(name: str) -> int:
        if name not in names:
            got = f"got dp_mesh_dims with '{name}', expected names of the mesh: {names}"
            refuse(got, "Name its dimensions.")
        return names.index(name)

    shard = tuple(map(index_of, dp_mesh_dims.shard_names))
    replicate = tuple(map(index_of, dp_mesh_dims.replicate_names))
    if not shard and not replicate:
        refuse("got dp_mesh_dims without a name", "Set shard or replicate.")
    if len({*shard, *replicate}) < len(shard) + len(replicate):
        refuse(f"got {dp_mesh_dims}, which names a dimension twice", "Name each once.")
    return FullMesh(mesh, shard, replicate)


def data_mesh(full: FullMesh) -> DeviceMesh:
    """The data parallel dimensions of it, those of one kind made one: sharded, replicated, or both
    in FsdpMesh's order. Collective where dimensions are put together for the first time."""
    parts = [_flat(full, dims) for dims in (full.replicate_dims, full.shard_dims) if dims]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def _flat(full: FullMesh, dims: tuple[int, ...]) -> DeviceMesh:
    names = tuple(full.name(index) for index in dims)
    if len(names) == 1:
        return full.mesh[names[0]]
    return full.mesh[names]._flatten("_".join(names))
