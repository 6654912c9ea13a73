"""What of a module DistributedDataParallel keeps equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


@dataclass
class ModuleTensors:
    """Parameters in the order of ``named_parameters()``, and what else is kept equal."""

    names: list[str] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    sparse_gradient: list[bool] = field(default_factory=list)
    integers: list[torch.Tensor] = field(default_factory=list)
    """Parameters that can have no gradient; they are only made equal at the start."""
    buffer_places: list[tuple[nn.Module, str]] = field(default_factory=list)
    """(layer, name) of each buffer: a layer may put another tensor in the place of its buffer."""

    @staticmethod
    def of(module: nn.Module, ignored: set[str]) -> ModuleTensors:
        """Without what is ignored by name and without the parameters of a DDP module inside."""
        tensors = ModuleTensors()
        nested = _parameters_of_nested(module)
        sparse = {
            layer.weight
            for layer in module.modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        }
        for name, parameter in module.named_parameters():
            if name in ignored or parameter in nested:
                continue
            if not (parameter.is_floating_point() or parameter.is_complex()):
                tensors.integers.append(parameter.detach())
                continue
            tensors.names.append(name)
            tensors.parameters.append(parameter)
            tensors.sparse_gradient.append(parameter in sparse)
        tensors.buffer_places = [
            (layer, name)
            for prefix, layer in module.named_modules()
            for name in layer._buffers
            if f"{prefix}.{name}".lstrip(".") not in ignored
        ]
        return tensors


def _parameters_of_nested(module: nn.Module) -> set[nn.Parameter]:
    return {
        parameter
        for inner in module.modules()
        if isinstance(inner, TorchDDP)
        for parameter in inner.module.parameters()
    }
