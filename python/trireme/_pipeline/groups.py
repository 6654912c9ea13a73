"""The ranks of a pipeline, and those that have the same stages in copies of it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trireme._pipeline import AREA, refuse


def groups_of(
    mesh: DeviceMesh | None,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Returns the group of this rank's pipeline, and that of its copies if there are several."""
    if mesh is None:
        return AREA.expect_group(None, ""), None
    if not isinstance(mesh, DeviceMesh):
        got = f"got {type(mesh).__name__} as mesh, expected a DeviceMesh"
        refuse(got, "Make one with torch.distributed.init_device_mesh().", kind=TypeError)
    if mesh.ndim == 1:
        return mesh.get_group(), None
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        refuse("got a mesh without a dimension 'pp'", "Name the one of the pipeline so.")
    others = [name for number, name in enumerate(names) if name != "pp" and mesh.size(number) > 1]
    if len(others) > 1:
        got = f"got a mesh with {', '.join(map(repr, others))} beside 'pp', expected one dimension"
        refuse(got, "Flatten the dimensions of copies into one.")
    return mesh.get_group("pp"), mesh.get_group(others[0]) if others else None
