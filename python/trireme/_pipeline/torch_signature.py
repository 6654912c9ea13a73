"""Constructors that are called as torch's are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

P = ParamSpec("P")


def as_in_torch(
    torchs: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Gives a constructor that takes its arguments by name the signature and the defaults that
    torch's has in the installed version. What only a newer torch has is taken by name, too."""
    signature = inspect.signature(torchs)

    def decorate(own: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(own)
        def called(self: Any, /, *args: Any, **options: Any) -> None:
            newer = {name: options.pop(name) for name in set(options) - set(signature.parameters)}
            given = signature.bind(self, *args, **options)
            given.apply_defaults()
            own(**given.arguments, **newer)

        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate
