"""The ranks of a pipeline, and those that have the same stages in copies of it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trireme._core.meshes import group_over
from trireme._pipeline import AREA, refuse


def groups_of(
    mesh: DeviceMesh | None,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None, dist.ProcessGroup]:
    """Returns the group of this rank's pipeline, that of its copies if there are several, and that
    of all ranks of all copies."""
    if mesh is None:
        group = AREA.expect_group(None, "")
        return group, None, group
    if not isinstance(mesh, DeviceMesh):
        got = f"got {type(mesh).__name__} as mesh, expected a DeviceMesh"
        refuse(got, "Make one with torch.distributed.init_device_mesh().", kind=TypeError)
    if mesh.ndim == 1:
        return mesh.get_group(), None, mesh.get_group()
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        refuse("got a mesh without a dimension 'pp'", "Name the one of the pipeline so.")
    others = [name for number, name in enumerate(names) if name != "pp" and mesh.size(number) > 1]
    if len(others) > 1:
        got = f"got a mesh with {', '.join(map(repr, others))} beside 'pp', expected one dimension"
        refuse(got, "Flatten the dimensions of copies into one.")
    own = mesh.get_group("pp")
    return (own, mesh.get_group(others[0]), group_over([mesh])) if others else (own, None, own)
