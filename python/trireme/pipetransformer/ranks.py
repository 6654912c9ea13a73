"""The ranks that train a model together, whatever strategy it is under."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from trireme._C import Communicator
from trireme._core.group_communicator import communicator_of
from trireme._core.meshes import group_over
from trireme._core.owners import averaging_module_of, group_of_stages, optimizer_of, unit_of


def ranks_of(model: nn.Module) -> Communicator | None:
    """Returns those ranks: the most that have to do with one of its parameters; None for a model
    of this process alone. Collective as ``group_over`` is, where parameters lie on a mesh."""
    groups = [group_of_stages(module) for module in model.modules()]
    meshes: list[Any] = []
    for parameter in model.parameters():
        averaging, optimizer = averaging_module_of(parameter), optimizer_of(parameter)
        groups += [owner.process_group for owner in (averaging, optimizer) if owner is not None]
        if unit_of(parameter) is not None:
            meshes.append(getattr(parameter, "device_mesh", None))
    if meshes:
        groups.append(group_over([max(meshes, key=lambda mesh: mesh.size())]))
    found = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    return communicator_of(max(found, key=lambda group: group.size())) if found else None
