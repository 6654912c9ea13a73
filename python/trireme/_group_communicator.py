"""The C++ communicator over a process group of torch.distributed."""

from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

from trireme import _C

# One per group: each opens a connection to the group's Store, which can take seconds where the
# host's name resolution is slow.
_communicators: WeakValueDictionary[dist.ProcessGroup, _C.Communicator] = WeakValueDictionary()


def communicator_of(group: dist.ProcessGroup) -> _C.Communicator:
    """The communicator of ``group``, which lives as long as somebody keeps it."""
    communicator = _communicators.get(group)
    if communicator is None:
        communicator = _C.make_c10d_communicator(group, _store_of(group))
        _communicators[group] = communicator
    return communicator


def _store_of(group: dist.ProcessGroup) -> Store | None:
    """Where the ranks of ``group`` met, under its prefix; None for a group unknown to torch."""
    entry = distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]
