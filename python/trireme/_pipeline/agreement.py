"""Ranks compare what they were given before they use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trireme import _C
from trireme._C import Communicator
from trireme._core.errors import text_of
from trireme._pipeline import refuse

_FAILED = "!"


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
    own = json.dumps(said)
    if error is not None:
        own = f"{_FAILED}{type(error).__name__}: {text_of(error)}"
    texts, any_flag = _C.differing_texts(own.encode(errors="backslashreplace"), communicator, flag)
    if error is not None:
        try:
            raise error
        finally:
            del error  # it holds this frame
    if texts is None:
        return any_flag

    def refuse_here(got: str) -> None:
        next_step = "Give all ranks the same."
        refuse(got, next_step, rank=communicator.rank, world=communicator.world)

    for rank, text in enumerate(texts):
        if text.startswith(_FAILED):
            refuse_here(f"got {what} that rank {rank} cannot use: {text[1:]}")
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
