"""Replicas of a Python module: modules like it, whose tensors a C++ core keeps like its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme import _C

_OWN = ("_parameters", "_buffers", "_modules")


def find_refused(module: nn.Module) -> tuple[str, str] | None:
    """The first layer that cannot be in a replica: its name, and what it is."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            return name, "a ScriptModule"
        if isinstance(layer, nn.parallel.DataParallel):
            return name, "a DataParallel"
        if isinstance(layer, nn.parallel.DistributedDataParallel):
            return name, "a DistributedDataParallel"
        if hasattr(layer, "_get_fsdp_state"):
            return name, "a module of fully_shard"
        if isinstance(layer, nn.SyncBatchNorm):  # each replica would normalize its part alone
            return name, "a SyncBatchNorm"
        if getattr(layer, "_compiled_call_impl", None) is not None or hasattr(layer, "_orig_mod"):
            return name, "a compiled module"
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return name, "a lazy parameter without a shape"
    return None


class ReplicaModules:
    """Replicas of `module`, one per device.

    A replica is what `module._replicate_for_data_parallel()` makes of each layer: an object of the
    same class with the same attributes. Its parameters are registered ones, as in the module, and
    leaves of autograd of their own. `tensors` is what the C++ core makes them equal by.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._module = module
        self._devices = list(devices)
        self._layers = list(module.modules())
        names = {id(layer): name for name, layer in module.named_modules()}
        place = {id(layer): i for i, layer in enumerate(self._layers)}
        parameters, buffers = _tensors_of(self._layers, names)
        self._shells: list[list[nn.Module]] = []  # [layer][replica]
        for layer in self._layers:
            self._shells.append([layer._replicate_for_data_parallel() for _ in devices])
        self._seen = [_identity(layer) for layer in self._layers]
        # They are held so that no other object takes an id that was seen.
        self._held = [[dict(vars(layer)[name]) for name in _OWN] for layer in self._layers]
        leaves = [[_leaf(p, device) for p, _ in parameters.values()] for device in devices]
        copies = [[_copy(b, device) for b in buffers.values()] for device in devices]
        number = {key: i for i, key in enumerate(parameters)}
        buffer_number = {key: i for i, key in enumerate(buffers)}
        for layer, shells in zip(self._layers, self._shells, strict=True):
            for replica, shell in enumerate(shells):
                for key, child in layer._modules.items():
                    if child is not None:
                        shell._modules[key] = self._shells[place[id(child)]][replica]
                for key, held in (*layer._parameters.items(), *layer._buffers.items()):
                    if held is None:
                        tensor = None
                    elif id(held) in number:
                        tensor = leaves[replica][number[id(held)]]
                    else:
                        tensor = copies[replica][buffer_number[id(held)]]
                    own = shell._parameters if key in layer._parameters else shell._buffers
                    own[key] = tensor  # type: ignore[assignment]
        self._special = [_has_own_rule(layer) for layer in self._layers]
        self.tensors = _C.ModuleReplicas(
            devices=self._devices,
            names=[name for _, name in parameters.values()],
            parameters=[p for p, _ in parameters.values()],
            leaves=leaves,
            buffers=list(buffers.values()),
            replica_buffers=copies,
        )
        self.follow()

    def __getitem__(self, replica: int) -> nn.Module:
        return self._shells[0][replica]

    def is_current(self, module: nn.Module) -> bool:
        """Whether `module` has the layers, parameters and buffers that were replicated."""
        return module is self._module and all(
            _identity(layer) == seen for layer, seen in zip(self._layers, self._seen, strict=True)
        )

    def follow(self) -> None:
        """Gives the replicas the attributes that the layers of the module have now.

        What a replica's forward has set is lost by this, as in torch, whose replicas are thrown
        away after each forward.
        """
        for layer, shells, special in zip(self._layers, self._shells, self._special, strict=True):
            state = vars(layer)
            for shell in shells:
                own = vars(shell)
                parameters, buffers, modules = own["_parameters"], own["_buffers"], own["_modules"]
                source = vars(layer._replicate_for_data_parallel()) if special else state
                own.clear()
                own.update(source)
                own["_parameters"], own["_buffers"], own["_modules"] = parameters, buffers, modules
                own["_is_replica"] = True
                if special:
                    # Classes with caches of their parameters renew them when one is set.
                    for key, leaf in parameters.items():
                        setattr(shell, key, leaf)


def _has_own_rule(layer: nn.Module) -> bool:
    rule = type(layer)._replicate_for_data_parallel
    return rule is not nn.Module._replicate_for_data_parallel


def _identity(layer: nn.Module) -> list[Any]:
    parameters, buffers, modules = layer._parameters, layer._buffers, layer._modules
    return [
        *parameters, *map(id, parameters.values()),
        *buffers, *map(id, buffers.values()),
        *modules, *map(id, modules.values()),
    ]  # fmt: skip


def _tensors_of(
    layers: Sequence[nn.Module], names: dict[int, str]
) -> tuple[dict[int, tuple[Tensor, str]], dict[int, Tensor]]:
    """Finds what takes part in gradients, with its name, and the other buffers, each once by id."""
    learned: dict[int, tuple[Tensor, str]] = {}
    buffers: dict[int, Tensor] = {}
    for layer in layers:
        prefix = names[id(layer)]

        def named(items: dict[str, Any], prefix: str = prefix) -> Iterator[tuple[str, Tensor]]:
            for key, tensor in items.items():
                if tensor is not None:
                    yield (f"{prefix}.{key}" if prefix else key), tensor

        for name, tensor in named(layer._parameters):
            learned.setdefault(id(tensor), (tensor, name))
        for name, tensor in named(layer._buffers):
            if tensor.requires_grad:
                learned.setdefault(id(tensor), (tensor, name))
            elif id(tensor) not in learned:
                buffers.setdefault(id(tensor), tensor)
    return learned, buffers


def _leaf(master: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        data = (
            master.detach() if master.device == device else torch.empty_like(master, device=device)
        )
    if not isinstance(master, nn.Parameter):
        return data.requires_grad_(master.requires_grad)
    leaf = torch.Tensor._make_subclass(type(master), data, master.requires_grad)
    vars(leaf).update(vars(master))
    return leaf


def _copy(buffer: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        return torch.empty_like(buffer, device=device)
