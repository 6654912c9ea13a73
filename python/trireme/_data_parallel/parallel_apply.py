"""``torch.nn.parallel``'s parallel_apply and data_parallel, also for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from trireme._data_parallel import AREA, refuse
from trireme._data_parallel.devices import DeviceLike, default_devices, to_device
from trireme._data_parallel.nested import first_tensor
from trireme._data_parallel.replicate import replicate
from trireme._data_parallel.scatter_gather import gather, scatter_kwargs
from trireme._data_parallel.targets import target_devices
from trireme._data_parallel.workers import run_in_threads


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Replaces ``torch.nn.parallel.parallel_apply``: ``modules[i](*inputs[i], **kwargs_tup[i])``.

    All at the same time, each in a thread of its own with the caller's grad mode, autocast and
    streams. The first exception in order of ``modules`` is raised as it was, with a note that names
    the replica.

    Args:
        inputs: a tuple or list of positional arguments, or anything else as the only one.
        devices: where each runs. None: where the first tensor among its inputs is; the CPU if there
            is none.

    Returns:
        What each returned, in order.

    Raises:
        AssertionError: another number of inputs, kwargs or devices than of modules.
        TypeError, ValueError: no modules, or a device that does not exist.

    Cost: threads are started and ended, some 0.1 ms each; ``trireme.DataParallel`` keeps them.
    """
    if not modules:
        refuse("got no modules, expected at least one", "Give what replicate returned.")
    lists = {"inputs": inputs, "kwargs_tup": kwargs_tup, "devices": devices}
    for name, given in lists.items():
        if given is not None and len(given) != len(modules):
            refuse(
                f"got {len(given)} {name} for {len(modules)} modules, expected as many",
                "Give one entry per module.",
                kind=AssertionError,  # torch raises this kind
            )
    kwargs = [{} for _ in modules] if kwargs_tup is None else kwargs_tup
    named = [None for _ in modules] if devices is None else devices
    places = [
        _device_of(own) if device is None else to_device(device)
        for device, own in zip(named, zip(inputs, kwargs, strict=True), strict=True)
    ]

    def apply(i: int) -> Any:
        own = inputs[i]
        if not isinstance(own, (list, tuple)):
            own = (own,)
        return modules[i](*own, **kwargs[i])

    return run_in_threads(places, apply)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Replaces ``torch.nn.parallel.data_parallel``: ``module(*inputs, **module_kwargs)`` in parts.

    `replicate`, `scatter_kwargs`, `parallel_apply` and `gather`, one after the other. The result
    has one graph, in which everything is differentiable, as often as wanted:
    ``create_graph=True`` works, and backward is that of one process. With one device the module
    itself is called.

    Args:
        module: its parameters and buffers on the first device.
        inputs: a tuple of positional arguments, or anything else as the only one; None for none.
        device_ids: see `replicate`. None: all accelerators if the module is on one, otherwise two
            replicas on the CPU.
        output_device: the first device if None.

    Raises:
        TypeError, ValueError: see those functions; a module on another device.

    Cost: those of the four functions in each call; ``trireme.DataParallel`` keeps replicas and
    threads, and its backward is parallel, too.
    """
    positional: tuple[Any, ...] = (
        inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    )
    AREA.expect_module(module)
    devices = default_devices(module, None, 2) if device_ids is None else device_ids
    targets = target_devices(devices, "device_ids")
    output = targets[0] if output_device is None else to_device(output_device)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != targets[0]:
            refuse(
                f"got '{name}' on {tensor.device}, expected it on {targets[0]}, the first of "
                "device_ids",
                f"Call module.to('{targets[0]}') first.",
            )
    parts, kwargs = scatter_kwargs(positional, module_kwargs, targets, dim)
    if not parts:
        parts, kwargs = ((),), ({},)  # a module without inputs runs once
    if len(targets) == 1:
        return module(*parts[0], **kwargs[0])
    used = targets[: len(parts)]
    replicas = replicate(module, used, detach=not torch.is_grad_enabled())
    return gather(parallel_apply(replicas, parts, kwargs, used), output, dim)


def _device_of(inputs: Any) -> torch.device:
    tensor = first_tensor(inputs)
    return torch.device("cpu") if tensor is None else to_device(tensor.device)
