"""torchgpipe.balance's functions: how many layers each partition is to have."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trireme._core.nested import map_tensors, tensors_in
from trireme._pipeline import refuse
from trireme._pipeline.measure import measure_layers
from trireme._pipeline.schedule import partition


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """Returns layers per partition, so that the most costly one costs least."""
    return partition(cost, partitions)


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Balances by what forward and backward of each layer take.

    Args:
        partitions: How many there are to be.
        module: The layers, which are left as they are.
        sample: What the first layer is called with: a batch of any size.
        timeout: Seconds after which no further run is begun.
        device: Where layers are measured, by a copy; None for where the sample is.
    """
    module, sample = _on(module, sample, device)
    begin = time.monotonic()
    seconds = [0.0] * len(module)
    with _in_training(module):
        while True:
            for number, costs in enumerate(measure_layers(module, sample)):
                seconds[number] += costs.seconds
            if time.monotonic() - begin >= timeout:
                return balance_cost(seconds, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Balances by bytes: parameters, and what autograd keeps of a micro-batch.

    Args:
        partitions: How many there are to be.
        module: The layers, which are left as they are.
        input: A batch of the size to train with.
        chunks: How many micro-batches it will be cut into.
        param_scale: How many tensors of a parameter's size there are: itself, its gradient, and
            what the optimizer keeps (2 more for Adam).
        device: Where layers are measured, by a copy; None for where the input is.
    """
    if chunks < 1:
        refuse(f"got chunks={chunks}, expected 1 or more", "Pass the number of micro-batches.")
    module, sample = _on(module, input, device)
    sample = map_tensors(sample, lambda one: one.tensor_split(chunks)[0] if one.dim() else one)
    with _in_training(module):
        measured = measure_layers(module, sample)
    costs = []
    for layer, costs_of_it in zip(module, measured, strict=True):
        weight = sum(p.numel() * p.element_size() for p in layer.parameters())
        costs.append(costs_of_it.activation_bytes + param_scale * weight)
    return balance_cost(costs, partitions)


@contextmanager
def _in_training(module: nn.Module) -> Iterator[None]:
    if any(parameter.grad is not None for parameter in module.parameters()):
        refuse("got a module of which some parameter already has gradient", "Call zero_grad().")
    modes = [(inner, inner.training) for inner in module.modules()]
    module.train()
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


def _on(
    module: nn.Sequential, sample: Any, device: torch.device | str | int | None
) -> tuple[nn.Sequential, Any]:
    if device is None:
        return module, sample
    where = torch.device(device)
    held = [*module.parameters(), *module.buffers(), *tensors_in(sample)]
    if all(tensor.device.type == where.type for tensor in held):
        return module, sample

    def move(one: Tensor) -> Tensor:
        return one.detach().to(where)

    return copy.deepcopy(module).to(where), map_tensors(sample, move)
