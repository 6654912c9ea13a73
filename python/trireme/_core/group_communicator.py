"""The C++ communicator over a process group of torch.distributed."""

from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store, distributed_c10d

from trireme import _C
from trireme._core.farewell import say_farewell_at_the_end

# One per group: each opens a connection to the group's Store, which can take seconds where the
# host's name resolution is slow.
_communicators: WeakValueDictionary[dist.ProcessGroup, _C.Communicator] = WeakValueDictionary()


def communicator_of(group: dist.ProcessGroup) -> _C.Communicator:
    """The communicator of ``group``, which lives as long as somebody keeps it."""
    communicator = _communicators.get(group)
    if communicator is None:
        say_farewell_at_the_end()
        communicator = _C.make_communicator(group, _store_of(group))
        _communicators[group] = communicator
    return communicator


_kept: WeakKeyDictionary[nn.Module, _C.Communicator] = WeakKeyDictionary()


def keep_communicator(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Keeps the communicator of ``group`` as long as ``model`` lives, for what is made once and
    lives as long as the communicator."""
    if group is not None:
        _kept[model] = communicator_of(group)


def device_of_numbers(group: dist.ProcessGroup) -> torch.device:
    """Says where numbers lie for ``group`` to move them: the CPU, or this rank's device of a group
    that takes none there (NCCL alone)."""
    kinds = [device.type for device in group._device_types]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def _store_of(group: dist.ProcessGroup) -> Store | None:
    """Says where the ranks of ``group`` met, under its prefix; None for a group unknown to
    torch."""
    entry = distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]
