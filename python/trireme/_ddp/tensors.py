"""What of a module DistributedDataParallel keeps equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from trireme._C import ModuleNow
from trireme._ddp.nesting import parameters_of_torchs

if TYPE_CHECKING:
    from trireme._ddp.module import DistributedDataParallel


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
    buffers: list[str] = field(default_factory=list)
    """A line for each of them, by which ranks compare."""

    @staticmethod
    def of(module: nn.Module, ignored: set[str]) -> ModuleTensors:
        """Leaves out what is ignored by name, and what torch's class inside averages."""
        tensors = ModuleTensors()
        nested = parameters_of_torchs(module)
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
        for prefix, layer in module.named_modules():
            for name, buffer in layer._buffers.items():
                path = f"{prefix}.{name}".lstrip(".")
                if path in ignored:
                    continue
                tensors.buffer_places.append((layer, name))
                if buffer is not None:
                    tensors.buffers.append(f"{path} {buffer.dtype} {tuple(buffer.shape)}")
        return tensors

    def has_those_of(self, other: ModuleTensors) -> bool:
        """Whether both have the same tensors, under whatever names and in whatever order."""
        return (
            set(map(id, self.parameters)) == set(map(id, other.parameters))
            and self.buffer_places == other.buffer_places
        )

    def is_lent(self) -> bool:
        """Whether ``torch.func.functional_call`` has put what is no parameter in the places of
        some, as long as a forward runs."""
        return not all(isinstance(parameter, nn.Parameter) for parameter in self.parameters)


def watching(
    ddp: DistributedDataParallel,
) -> tuple[Callable[[bool], ModuleNow | None], Callable[[], None]]:
    """Returns what the core calls to look at the module of ``ddp``, and when it has taken over what
    it saw.

    They keep ``ddp``, which keeps the core, alive no longer than others do.
    """
    alive = weakref.ref(ddp)

    def look(thoroughly: bool) -> ModuleNow | None:
        owner = alive()
        now = None if owner is None else owner._look_at_module(thoroughly)
        if now is None:
            return None
        return ModuleNow(
            names=now.names,
            parameters=now.parameters,
            sparse_gradient=now.sparse_gradient,
            beside=now.buffers,
        )

    def adopted() -> None:
        owner = alive()
        if owner is not None:
            owner._adopt_module()

    return look, adopted
