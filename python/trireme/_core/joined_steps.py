"""How ranks that have run out of inputs step as those do that have not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

_NEVER = -math.inf


def share_step(
    optimizer: Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    has_inputs: bool,
    gradients: bool,
) -> None:
    """Before a step in a torch ``Join``, which tells such a rank nothing: it gets the numbers of
    the others' ``param_groups``, which a learning-rate schedule changes, and with ``gradients``
    their gradients, which may be clipped.

    Collective. Costs a small all-reduce, and once a rank has run out a broadcast of the gradients.
    """
    places = list(_numbers(optimizer))
    own = [number for *_, number in places] if has_inputs else [_NEVER] * len(places)
    rank = -group.rank() if has_inputs else _NEVER
    told = torch.tensor([0.0 if has_inputs else 1.0, rank, *own], dtype=torch.float64)
    told = told.to(device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    any_has_run_out, root, *numbers = told.tolist()
    if not any_has_run_out:
        return
    if not has_inputs:
        for (options, name, index, _), number in zip(places, numbers, strict=True):
            _set(options, name, index, number)
    if gradients:
        _share_gradients(optimizer, group, device, int(-root), has_inputs=has_inputs)


def _numbers(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], str, int | None, float]]:
    """Each number of the options: its dict, its name, its index in a tuple, its value."""
    for options in optimizer.param_groups:
        for name, value in options.items():
            is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
            if is_tensor or isinstance(value, bool | int | float):
                yield options, name, None, float(value)
            elif isinstance(value, tuple):
                for index, item in enumerate(value):
                    if isinstance(item, bool | int | float):
                        yield options, name, index, float(item)


def _set(options: dict[str, Any], name: str, index: int | None, number: float) -> None:
    value = options[name]
    if isinstance(value, torch.Tensor):
        value.fill_(number)
    elif index is None:
        options[name] = type(value)(number)
    else:
        one = type(value[index])(number)
        options[name] = (*value[:index], one, *value[index + 1 :])


@torch.no_grad()
def _share_gradients(
    optimizer: Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    root: int,
    *,
    has_inputs: bool,
) -> None:
    parameters = [param for options in optimizer.param_groups for param in options["params"]]
    found = [
        parameter.grad is not None and parameter.grad.layout == torch.strided
        for parameter in parameters
    ]
    has_gradient = torch.tensor(found, dtype=torch.uint8, device=device)
    dist.broadcast(has_gradient, group=group, group_src=root)
    for parameter, is_there in zip(parameters, has_gradient.tolist(), strict=True):
        if not is_there:
            if not has_inputs:
                parameter.grad = None
            continue
        is_root = has_inputs and group.rank() == root
        value = parameter.grad if is_root else torch.empty_like(parameter)
        moved = value.contiguous()
        dist.broadcast(moved, group=group, group_src=root)
        if not has_inputs:
            parameter.grad = moved
