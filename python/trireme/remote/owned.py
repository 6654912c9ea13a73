"""What a module may not have that callers of other processes train."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trireme._core.owners import optimizer_of, table_of
from trireme.remote.areas import AREA


def check_owned(module: nn.Module) -> None:
    """Refuses strategies over several ranks, and tables: gradients are kept apart for each caller,
    so these would have nothing to average or to push, and no caller would hear of it."""
    for name, layer in module.named_modules():
        averages = isinstance(layer, DistributedDataParallel) and _has_others(layer.process_group)
        if averages or hasattr(layer, "_get_fsdp_state"):
            _refuse(f"{type(layer).__name__} at '{name}'")
    for name, parameter in module.named_parameters():
        optimizer = optimizer_of(parameter)
        if optimizer is not None and _has_others(optimizer.process_group):
            _refuse(f"'{name}' of a ZeroRedundancyOptimizer")
        if table_of(parameter) is not None:
            _refuse(f"'{name}' of a table of a server")


def _has_others(group: dist.ProcessGroup) -> bool:
    return dist.get_world_size(group) > 1


def _refuse(what: str) -> None:
    got = f"got {what} in a module of a factory, expected modules of this process alone"
    AREA.refuse(got, "Return the plain module: gradients stay apart for each caller.")
