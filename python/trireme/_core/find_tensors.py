"""The tensors in what a module's forward returned."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset, deque)


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
        elif isinstance(item, _PLAIN) or id(item) in seen:
            continue
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, _SEQUENCES):
            pending += item
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            pending += [getattr(item, field.name) for field in dataclasses.fields(item)]
        elif isinstance(item, (nn.Module, type)) or callable(item) or not hasattr(item, "__dict__"):
            all_found = False
        else:
            pending += vars(item).values()
        seen.add(id(item))
    return tensors, all_found
