"""The tensors in what a module's forward returned."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trireme._core.nested import PLAIN, children


def find_tensors(output: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors in ``output``, and whether that is certain to be all of them.

    Looks into containers, dataclasses and the attributes of other objects. It is not certain when
    a module, a function or an object without ``__dict__`` is among them.
    """
    if isinstance(output, torch.Tensor):
        return [output], True
    tensors: list[torch.Tensor] = []
    all_found = True
    seen: set[int] = set()
    pending = [output]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, PLAIN) or id(item) in seen:
            continue
        elif (held := _held_by(item)) is None:
            all_found = False
        else:
            pending += held
        seen.add(id(item))
    return tensors, all_found


def _held_by(item: Any) -> Iterable[Any] | None:
    """What may hold tensors in ``item``; None where that cannot be said."""
    if isinstance(item, (set, frozenset, deque)):
        return item
    held = children(item)
    if held is not None:
        return held
    if isinstance(item, (nn.Module, type)) or callable(item) or not hasattr(item, "__dict__"):
        return None
    return vars(item).values()
