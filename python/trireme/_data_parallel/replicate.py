"""``torch.nn.parallel``'s replicate, also for the CPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from trireme._data_parallel.devices import DeviceLike
from trireme._data_parallel.targets import check_replicable, moved, target_devices

M = TypeVar("M", bound=nn.Module)


def replicate(network: M, devices: Sequence[DeviceLike], detach: bool = False) -> list[M]:
    """Replaces ``torch.nn.parallel.replicate``: modules like ``network``, one per device.

    Their parameters are plain attributes, functions of those of ``network``: gradients arrive
    there, summed, and have gradients themselves. Parameters and layers that ``network`` has in
    several places are in several places of a replica, once. The first replica on the device of a
    buffer has the buffer itself, so that what is written there in place stays; the others have
    copies. Each layer is made by its ``_replicate_for_data_parallel()``.

    Args:
        devices: ints (accelerators), -1 or ``"cpu"``, ``torch.device``; also the same twice.
        detach: parameters without a graph.

    Raises:
        TypeError, ValueError: no module; a ScriptModule, a compiled or a parallel module or a lazy
            parameter in it; no or unknown devices (for none torch returns an empty list).

    Cost: parameters share memory with those of ``network`` on the same device, and are copied to
    others in every call.
    """
    check_replicable(network)
    targets = target_devices(devices, "devices")
    layers = list(network.modules())
    parameters = list(network.parameters())
    buffers = list(network.buffers())
    replicas = []
    for i, device in enumerate(targets):
        tensors = {id(parameter): _parameter(parameter, device, detach) for parameter in parameters}
        for buffer in buffers:
            is_first = buffer.device not in targets[:i]
            tensors[id(buffer)] = _buffer(buffer, device, detach, is_first)
        replicas.append(cast(M, _replica(layers, tensors)))
    return replicas


def _parameter(parameter: Tensor, device: torch.device, detach: bool) -> Tensor:
    source = parameter.detach() if detach else parameter
    if parameter.device != device:
        return moved(source, device)
    return source if detach else _alias(source)


def _buffer(buffer: Tensor, device: torch.device, detach: bool, is_first: bool) -> Tensor:
    differentiable = buffer.requires_grad and not detach
    source = buffer.detach() if buffer.requires_grad and detach else buffer
    if buffer.device != device:
        return moved(source, device)
    if is_first:
        return _alias(source) if differentiable else source
    return source.clone()


def _alias(tensor: Tensor) -> Tensor:
    """Makes a function of ``tensor`` with its memory; unlike a view it takes sparse gradients."""
    if tensor.layout != torch.strided:
        return tensor.clone()
    return cast(Tensor, torch.ops.aten.alias.default(tensor))


def _replica(layers: Sequence[nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """``layers``, the first of which holds the rest, with ``tensors`` in place of theirs, by id."""
    shells: dict[int, Any] = {}
    for layer in layers:
        shell = layer._replicate_for_data_parallel()
        shell._former_parameters = OrderedDict()
        shells[id(layer)] = shell
    # Layers with caches of their parameters, as nn.LSTM, renew them in setattr.
    for layer in layers:
        shell = shells[id(layer)]
        for kind, made in (("_modules", shells), ("_parameters", tensors), ("_buffers", tensors)):
            for key, held in getattr(layer, kind).items():
                if held is None:
                    getattr(shell, kind)[key] = None
                    continue
                setattr(shell, key, made[id(held)])
                if kind == "_parameters":
                    shell._former_parameters[key] = made[id(held)]
    return cast(nn.Module, shells[id(layers[0])])
