"""Ranks tell each other once, as text, what all of them must know: nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from trireme._C import broadcast_text
from trireme._core.agreement import raised_on_all
from trireme._core.group_communicator import communicator_of
from trireme._zero import refuse


@contextmanager
def together(what: str, device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """An exception inside is raised on all ranks: elsewhere as one that names rank and cause.

    ``what`` is what that rank could not use, ``device`` where the group moves tensors. Collective
    at the end.
    """

    def refuse_here(rank: int, said: str) -> None:
        refuse(
            f"got {what} that rank {rank} cannot use: {said}",
            "Pass what every rank can use for its part of the parameters.",
            group,
        )

    with raised_on_all(communicator_of(group), device, refuse_here):
        yield


def agree_on_names(
    names: dict[torch.Tensor, str], were_given: bool, device: torch.device, group: dist.ProcessGroup
) -> dict[torch.Tensor, str]:
    """Returns ``names``, or rank 0's where both ranks have found them by themselves: modules that
    one rank alone has made, such as a wrapper for logging, make names that differ. Names that a
    caller gave are compared later, and so are those of models that differ. Collective.
    """
    own = json.dumps(None if were_given else list(names.values()))
    told = json.loads(broadcast_text(own, communicator_of(group), device))
    if were_given or told is None or len(told) != len(names):
        return names
    return dict(zip(names, told, strict=True))
