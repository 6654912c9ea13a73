"""The one way in which Python code refuses what it cannot do."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import GroupMember

from trireme._C import error_text

# Their messages name the rank in the default group. Those of other areas name one where they are
# given a group, since a run may have several, or a process may be alone.
_OF_ALL_RANKS = frozenset({"fully_shard", "horovod", "launch", "sync_batch_norm"})


Kinds = type | tuple[type, ...]


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
        """Raises ``kind`` in the form of all messages: [area] got, expected (rank r of w). next
        step.

        ``rank`` and ``world`` are for who knows them before there is a group.
        """
        if group is not None:
            rank, world = group.rank(), group.size()
        elif world < 0 and self.name in _OF_ALL_RANKS and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        raise kind(error_text(self.name, got, next_step, rank=rank, world=world))

    def expect(
        self, name: str, value: object, kinds: Kinds, expected: str, *, next_step: str
    ) -> None:
        """Raises TypeError for a ``value`` of another kind; a bool is no number."""
        if not isinstance(value, kinds) or isinstance(value, bool):
            got = f"{name} is {type(value).__name__}, expected {expected}"
            self.refuse(got, next_step, kind=TypeError)

    def expect_module(self, given: object) -> None:
        """Raises TypeError for what is no module."""
        if not isinstance(given, nn.Module):
            got = f"got {type(given).__name__} as module, expected a torch.nn.Module"
            self.refuse(got, "Pass the model itself.", kind=TypeError)

    def expect_group(self, given: object, next_step_outside: str) -> dist.ProcessGroup:
        """Returns the group that was given, or the default group for None.

        Raises:
            TypeError, ValueError: it is none; there is none; this rank is not in it.
        """
        if given is None:
            if not dist.is_initialized():
                got = "got no process group, expected an initialised one"
                self.refuse(got, "Call trireme.init() first.")
            given = dist.group.WORLD
        if given is GroupMember.NON_GROUP_MEMBER:
            got = f"got a process group without rank {dist.get_rank()}, expected one that has it"
            self.refuse(got, next_step_outside)
        if not isinstance(given, dist.ProcessGroup):
            self.refuse(
                f"got {type(given).__name__} as process_group, expected a "
                "torch.distributed.ProcessGroup",
                "Make one with torch.distributed.new_group(), or leave it out.",
                kind=TypeError,
            )
        return given


def text_of(error: BaseException) -> str:
    """Returns what an exception says, also where its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return "<its text cannot be made>"


def note(error: BaseException, text: str) -> None:
    """Lets an exception of the user's say more."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
