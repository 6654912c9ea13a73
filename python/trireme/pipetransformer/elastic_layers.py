"""The layers of a run whose ranks hold other ones from plan to plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trireme import _C
from trireme._C import Communicator
from trireme._core.group_communicator import communicator_of
from trireme._core.owners import ShardedOptimizer, table_of
from trireme.pipetransformer.areas import ELASTIC

Entry = nn.Module | Sequence[nn.Module]
"""A layer: what is frozen and moved at a time, one module or several that follow each other."""


class ElasticLayers(nn.Module):
    """All layers by name, of which each rank holds some: the parameters of others are there, too,
    and have no memory. A ``StagedModule``."""

    def __init__(self, layers: Mapping[str, nn.Module], group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._modules.update(layers)
        self._group = group
        self._ranks = communicator_of(group) if group is not None else _C.lone_communicator()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """All ranks that train; None for one process alone."""
        return self._group

    def norm_over_stages(self) -> Communicator:
        """Says for :func:`clip_grad_norm_` whose gradients count together."""
        return self._ranks

    def later_copies(self) -> list[Tensor]:
        """None: layers share no parameters."""
        return []

    def names_in_whole(self) -> dict[str, str]:
        """None: layers are called as they are."""
        return {}


def layers_by_name(
    layers: nn.Module | Iterable[Entry], group: dist.ProcessGroup | None
) -> dict[str, nn.Module]:
    """Returns the layers by the names that a Sequential of them has.

    Raises:
        TypeError, ValueError: no layers; one is no module.
    """
    found: dict[str, nn.Module] = {}
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        found = {name: one for name, one in layers._modules.items() if one is not None}
    elif isinstance(layers, nn.Module):
        got = f"got a {type(layers).__name__} as layers, expected a Sequential or a list"
        ELASTIC.refuse(got, "Write the model as a list of its layers.", group, kind=TypeError)
    else:
        for number, entry in enumerate(layers):
            if isinstance(entry, Sequence) and entry and all(map(_is_module, entry)):
                found[str(number)] = nn.Sequential(*entry)
            elif isinstance(entry, nn.Module):
                found[str(number)] = entry
            else:
                got = f"got {type(entry).__name__} as layer {number}, expected a module or a list"
                next_step = "Put what is frozen together in one list."
                ELASTIC.refuse(got, next_step, group, kind=TypeError)
    if not found:
        ELASTIC.refuse("got no layers", "Give them from the input on.", group)
    if len(set(found.values())) != len(found):
        ELASTIC.refuse("got one module as two layers", "Make two modules.", group)
    return found


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module)


def refuse_module(name: str, module: nn.Module, refuse: Callable[..., NoReturn]) -> None:
    """Refuses a module that is of certain ranks, or has more than tensors that would move."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        got = f"got a DistributedDataParallel at '{name}', expected layers that a run averages"
        refuse(got, "Give the module in it.")
    if isinstance(module, nn.SyncBatchNorm):
        got = f"got a SyncBatchNorm at '{name}', whose ranks change from plan to plan"
        refuse(got, "Keep BatchNorm, whose statistics are those of a micro-batch.")
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        got = f"got '{name}' with a get_extra_state(), which would not move with its layer"
        refuse(got, "Keep it in buffers.")


def check_layers(
    layers: Mapping[str, nn.Module], optimizer: object, group: dist.ProcessGroup | None
) -> None:
    """Raises ValueError or TypeError for layers that share tensors, have none on this rank, have
    more than these to move, or whose parameters are not those of ``optimizer``."""

    def refuse(got: str, next_step: str, kind: type[Exception] = ValueError) -> NoReturn:
        ELASTIC.refuse(got, next_step, group, kind=kind)

    seen: dict[int, str] = {}
    of_layers: set[int] = set()
    for layer, module in layers.items():
        for name, inner in module.named_modules(prefix=layer):
            refuse_module(name, inner, refuse)
        own: set[int] = set()
        for name, tensor in [*module.named_parameters(layer), *module.named_buffers(layer)]:
            if hasattr(tensor, "placements"):
                refuse(f"got '{name}', which is sharded", "Give layers that are whole.")
            if tensor.is_meta:
                refuse(f"got '{name}' on device meta", "Make all layers on each rank.")
            if table_of(tensor) is not None:
                refuse(
                    f"got '{name}', which a parameter server keeps, expected it to move with its "
                    "layer",
                    "Leave out the table.",
                )
            where = id(tensor) if tensor.numel() == 0 else tensor.untyped_storage().data_ptr()
            if where in own:
                continue
            if where in seen:
                refuse(
                    f"got '{name}', which is '{seen[where]}' as well, expected no layer to share "
                    "a tensor with another one, which is frozen and held elsewhere",
                    "Put both into one layer, or give each its own.",
                )
            own.add(where)
            seen[where] = name
        of_layers.update(map(id, module.parameters()))
    if isinstance(optimizer, ShardedOptimizer) or not isinstance(optimizer, Optimizer):
        got = f"got {type(optimizer).__name__} as optimizer, expected one of torch.optim"
        refuse(got, "Pass one over the parameters of all layers, on every rank.", TypeError)
    for number, group_of_parameters in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group_of_parameters["params"]):
            if id(parameter) not in of_layers:
                refuse(
                    f"got an optimizer whose param_groups[{number}]['params'][{index}] of shape "
                    f"{tuple(parameter.shape)} is no parameter of a layer",
                    "Make it over the parameters of the layers.",
                )
