"""Ranks tell each other, as text, whether they can go on: nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from trireme._C import Communicator, first_failure
from trireme._core.errors import text_of


def told_of(error: Exception) -> str:
    """Returns what other ranks are told of an exception."""
    return f"{type(error).__name__}: {text_of(error)}"


def as_bytes(text: str) -> bytes:
    """Encodes any text, also one with half of a surrogate pair."""
    return text.encode(errors="backslashreplace")


@contextmanager
def raised_on_all(
    communicator: Communicator,
    device: torch.device,
    refuse: Callable[[int, str], object],
    told: Callable[[Exception], str] = told_of,
) -> Iterator[None]:
    """An exception inside is raised on all ranks: elsewhere by ``refuse``, which gets the lowest
    rank that had one, and what that rank ``told`` of it. Collective at the end, over ``device``.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    own = None if error is None else as_bytes(told(error))
    failed = first_failure(own, communicator, device)
    if error is not None:
        try:
            raise error
        finally:
            del error  # it holds this frame, and with it what its frames hold
    if failed is not None:
        refuse(*failed)
