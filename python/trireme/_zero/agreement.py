"""Ranks tell each other once, as text, what all of them must know: nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from trireme._C import first_failure, gather_texts
from trireme._core.group_communicator import communicator_of
from trireme._zero import refuse


@contextmanager
def together(what: str, device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """An exception inside is raised on all ranks: elsewhere as one that names rank and cause.

    ``what`` is what that rank could not use, ``device`` where the group moves tensors. Collective
    at the end.
    """
    error, text = None, None
    try:
        yield
    except Exception as raised:
        error = raised
        text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
    failed = first_failure(text, communicator_of(group), device)
    if error is not None:
        try:
            raise error
        finally:
            del error  # it holds this frame, and with it what its frames hold
    if failed is not None:
        rank, said = failed
        refuse(
            f"got {what} that rank {rank} cannot use: {said}",
            "Pass what every rank can use for its part of the parameters.",
            group,
        )


def agree_on_names(
    names: dict[torch.Tensor, str], were_given: bool, device: torch.device, group: dist.ProcessGroup
) -> dict[torch.Tensor, str]:
    """Returns ``names``, or rank 0's where both ranks have found them by themselves: modules that
    one rank alone has made, such as a wrapper for logging, make names that differ. Names that a
    caller gave are compared later, and so are those of models that differ. Collective.
    """
    own = json.dumps(None if were_given else list(names.values()))
    told = json.loads(gather_texts(own, communicator_of(group), device)[0])
    if were_given or told is None or len(told) != len(names):
        return names
    return dict(zip(names, told, strict=True))
