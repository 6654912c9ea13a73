"""What Horovod's functions raise."""

from __future__ import annotations

import torch.distributed as dist

from trireme._C import error_text
from trireme._core.errors import Area

AREA = Area("horovod")
refuse = AREA.refuse


class HorovodInternalError(dist.DistBackendError):
    """An operation has failed on all its ranks, or a rank is gone."""


class NotPossible(Exception):
    """What ranks have agreed on cannot be done; nothing has moved."""


def operation_error(kind: str, name: str, what: str, rank: int, world: int) -> HorovodInternalError:
    """Returns an error that names the operation."""
    next_step = "Issue the same operation on all ranks of the set."
    text = error_text("horovod", f"{kind} '{name}': {what}", next_step, rank=rank, world=world)
    return HorovodInternalError(text)
