"""What fully_shard takes, and what it says about the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trireme._C import error_text
from trireme._fsdp_mesh import FsdpMesh
from trireme._parameter_owners import unit_of


def refuse(got: str, next_step: str, *, kind: type[Exception] = ValueError) -> NoReturn:
    """Raises ``kind`` in the house form."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (-1, -1)
    raise kind(error_text("fully_shard", got, next_step, rank=rank, world=world))


def not_here(got: str) -> NoReturn:
    """For what torch has and we do not."""
    refuse(f"got {got}, which is not implemented", "Leave it out.", kind=NotImplementedError)


def check_module(module: Any) -> None:
    if isinstance(module, (list, tuple)):
        if not module:
            refuse("got no modules", "Pass a module, or several.")
        for one in module:
            check_module(one)
        return
    if not isinstance(module, nn.Module):
        refuse(f"got {type(module).__name__}, expected a module", "Pass a torch.nn.Module.")
    without_forward = type(module).forward is nn.Module.forward
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and without_forward:
        refuse(
            f"got a {type(module).__name__}, which has no forward",
            "Shard the modules in it, or the one around it.",
        )


def resolve_mesh(mesh: DeviceMesh | None, dp_mesh_dims: object) -> FsdpMesh:
    """``mesh``, or one of all ranks, on the accelerator if their group has an engine for it."""
    if dp_mesh_dims is not None:
        not_here("dp_mesh_dims")
    if mesh is None:
        if not dist.is_initialized():
            refuse(
                "got no mesh and no process group",
                "Call trireme.init() first, or pass mesh=.",
                kind=RuntimeError,
            )
        return FsdpMesh(init_device_mesh(_default_device_type(), (dist.get_world_size(),)))
    if not isinstance(mesh, DeviceMesh):
        refuse(f"got {type(mesh).__name__} as mesh, expected a DeviceMesh", "Use init_device_mesh.")
    if mesh.ndim not in (1, 2):
        refuse(
            f"got a mesh of {mesh.ndim} dimensions, expected 1 (sharded) or 2 (replicated, "
            "sharded)",
            "Pass one or two dimensions of it: mesh['replicate', 'shard'].",
        )
    if dist.get_rank() not in mesh.mesh.flatten().tolist():
        refuse(f"got {mesh}, in which this rank is not", "Call fully_shard on its ranks only.")
    return FsdpMesh(mesh)


def _default_device_type() -> str:
    group = dist.group.WORLD
    kinds = {device.type for device in group._device_types} if group is not None else set()
    return "cuda" if torch.cuda.is_available() and "cuda" in kinds else "cpu"


def resolve_reshard(reshard_after_forward: bool | int | None, world: int) -> bool | None:
    """Whether units reshard after forward; None if that depends on whether they are the root."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if not isinstance(reshard_after_forward, int):
        refuse(
            f"got reshard_after_forward={reshard_after_forward!r}, expected a bool, an int or None",
            "Leave it out.",
        )
    if reshard_after_forward < 1 or world % reshard_after_forward != 0:
        refuse(
            f"got reshard_after_forward={reshard_after_forward}, expected a factor of {world}",
            "Pass True or False.",
        )
    if 1 < reshard_after_forward < world:
        not_here(f"reshard_after_forward={reshard_after_forward}")
    return reshard_after_forward > 1


def check_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    if unit_of(param) is not None:
        refuse(
            f"got '{name}', which is in an outer unit already",
            "Call fully_shard on inner modules before outer ones.",
        )
    if isinstance(param, DTensor):
        not_here(f"'{name}', which is a DTensor already")
    if param.layout != torch.strided:
        refuse(f"got '{name}' of layout {param.layout}, expected a dense one", "Make it dense.")
    if param.device.type not in ("cpu", "meta", device.type):
        refuse(
            f"got '{name}' on {param.device}, expected it on {device}, where the mesh is",
            "Move the module, or pass a mesh of its device.",
        )


def check_gradient_dtype(name: str, param: nn.Parameter) -> None:
    if getattr(param, "_has_grad_dtype_override", False) and param.grad_dtype != param.dtype:
        refuse(
            f"got '{name}' with grad_dtype={param.grad_dtype}, expected that of the parameter",
            "Use MixedPrecisionPolicy(reduce_dtype=...).",
            kind=NotImplementedError,
        )


def shard_dim(
    name: str, param: nn.Parameter, placement_of: Callable[[nn.Parameter], Any] | None
) -> int:
    """The dimension of ``param`` that is sharded."""
    placement = None if placement_of is None else placement_of(param)
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        if hasattr(placement, "mesh_info"):
            not_here(f"a mesh of its own for '{name}'")
        refuse(
            f"got {placement!r} as placement of '{name}', expected Shard(dim) or None",
            "Return torch.distributed.tensor.Shard.",
        )
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(param.ndim, 1):
        refuse(
            f"got {placement!r} for '{name}' of shape {tuple(param.shape)}",
            "Choose one of its dimensions.",
        )
    return dim


def check_units(modules: Sequence[nn.Module], is_unit: Callable[[nn.Module], bool]) -> None:
    """No module may be a unit already."""
    for module in modules:
        if is_unit(module):
            refuse(
                f"got {type(module).__name__}, which is sharded already",
                "Call fully_shard once per module, inner modules first.",
            )


def check_free(
    modules: Sequence[nn.Module], inner_units: Sequence[Any], names: dict[nn.Module, str]
) -> None:
    """No parameter may hang in two units."""
    taken = {id(one.sharded): unit for unit in inner_units for one in unit.params}
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and (id(param) in taken or hasattr(param, "_trireme_sharded")):
                refuse(
                    f"got '{names[module]}.{name}', which an inner unit shares",
                    "Put both modules into one unit: fully_shard([a, b]).",
                )
