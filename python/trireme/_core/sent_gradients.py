"""Modules whose backward hands gradients to somebody else than ``.grad`` of their parameters."""

from __future__ import annotations

from torch import nn


def sends_gradients(module: nn.Module) -> bool:
    """Says whether ``module``, or one in it, has an attribute ``sends_gradients`` that is true.

    What its backward sends, to a table of a server or to the owner of a remote module, has gone
    when the backward ends: whoever divides, unscales or clips ``.grad`` then does not reach it.
    """
    return any(getattr(inner, "sends_gradients", False) is True for inner in module.modules())
