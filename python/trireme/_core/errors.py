"""The one way in which Python code refuses what it cannot do."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from trireme._C import error_text

# Their messages name the rank in the default group. Those of other areas name one where they are
# given a group, since a run may have several, or a process may be alone.
_OF_ALL_RANKS = frozenset({"fully_shard", "launch", "sync_batch_norm"})


class Area:
    """A part of Trireme, by whose name its messages begin."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse(
        self,
        got: str,
        next_step: str,
        group: dist.ProcessGroup | None = None,
        *,
        rank: int = -1,
        world: int = -1,
        kind: type[Exception] = ValueError,
    ) -> NoReturn:
        """Raises ``kind`` in the name of this area; see :func:`refuse`."""
        refuse(self.name, got, next_step, group, rank=rank, world=world, kind=kind)


def refuse(
    area: str,
    got: str,
    next_step: str,
    group: dist.ProcessGroup | None = None,
    *,
    rank: int = -1,
    world: int = -1,
    kind: type[Exception] = ValueError,
) -> NoReturn:
    """Raises ``kind`` in the form of all messages: [area] got, expected (rank r of w). next step.

    ``rank`` and ``world`` are for who knows them before there is a group.
    """
    if group is not None:
        rank, world = group.rank(), group.size()
    elif world < 0 and area in _OF_ALL_RANKS and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    raise kind(error_text(area, got, next_step, rank=rank, world=world))
