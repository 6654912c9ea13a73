"""Which ranks keep their checkpointed inputs together."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupMember

from trireme import _C
from trireme._activation import AREA, refuse
from trireme._C import PartitionPacker
from trireme._core.group_communicator import communicator_of

_ELSEWHERE = "Call checkpoint without partition= on this rank."
# One per group, whose ranks it connects.
_packers: WeakKeyDictionary[dist.ProcessGroup, PartitionPacker] = WeakKeyDictionary()


def packer_of(given: dist.ProcessGroup | DeviceMesh) -> PartitionPacker:
    """The packer of a group or of a mesh of one dimension. Collective the first time.

    Raises:
        TypeError, ValueError: It is neither, or this rank is not in it.
    """
    group = _group_of(given)
    packer = _packers.get(group)
    if packer is None:
        packer = _packers[group] = _C.make_partition_packer(communicator_of(group))
    return packer


def _group_of(given: object) -> dist.ProcessGroup:
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            refuse(
                f"got a mesh of {given.ndim} dimensions as partition=, expected one",
                'Pass the dimension whose ranks have equal inputs, say mesh["tp"].',
            )
        if given.get_coordinate() is None:
            refuse("got a mesh without this rank as partition=", _ELSEWHERE)
        return given.get_group()
    is_group = isinstance(given, dist.ProcessGroup) or given is GroupMember.NON_GROUP_MEMBER
    if given is None or not is_group:
        refuse(
            f"got {type(given).__name__} as partition=, expected a process group or a DeviceMesh",
            "Make one with torch.distributed.new_group(), or leave it out.",
            kind=TypeError,
        )
    return AREA.expect_group(given, _ELSEWHERE)
