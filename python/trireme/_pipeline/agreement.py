"""Ranks compare what they were given before they use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trireme import _C
from trireme._C import Communicator
from trireme._core.agreement import as_bytes, told_of
from trireme._pipeline import refuse


def agree(
    communicator: Communicator,
    said: Mapping[str, Any],
    error: Exception | None,
    what: str,
    *,
    flag: bool = False,
) -> bool:
    """Raises on all ranks unless all say the same of ``what`` and none has an ``error``.

    A rank raises its own error; others raise a ValueError that names rank and cause. Returns
    whether any rank has set the ``flag``. Collective: one gather of a number where all is well.
    """
    own = json.dumps(said) if error is None else _C.as_complaint(as_bytes(told_of(error)))
    are_equal, any_flag = _C.compare_texts(own, communicator, flag)
    texts = [] if are_equal else _C.gather_texts(own, communicator, communicator.device)
    if error is not None:
        try:
            raise error
        finally:
            del error  # it holds this frame
    if are_equal:
        return any_flag

    def refuse_here(got: str) -> None:
        next_step = "Give all ranks the same."
        refuse(got, next_step, rank=communicator.rank, world=communicator.world)

    wrong = _C.first_complaint(texts)
    if wrong is not None:
        rank, text = wrong
        refuse_here(f"got {what} that rank {rank} cannot use: {text}")
    first, *others = (json.loads(text) for text in texts)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                got = (
                    f"got {what} that differs between ranks: {name} {value} on rank 0, "
                    f"{other.get(name)} on rank {rank}"
                )
                refuse_here(got)
    return any_flag
