"""What fully_shard takes, and what it says about the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trireme._core.meshes import ranks_of
from trireme._core.owners import local_of, unit_of
from trireme._fsdp import refuse
from trireme._fsdp.mesh import FsdpMesh
from trireme._fsdp.mesh_dims import data_mesh, full_mesh

if TYPE_CHECKING:
    from trireme._fsdp.unit import FsdpUnit


def check_module(module: Any) -> None:
    if isinstance(module, (list, tuple)):
        if not module:
            refuse("got no modules", "Pass a module, or several.")
        for root in module:
            check_module(root)
        return
    if not isinstance(module, nn.Module):
        refuse(f"got {type(module).__name__}, expected a module", "Pass a torch.nn.Module.")
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if is_container and type(module).forward is nn.Module.forward:
        refuse(
            f"got a {type(module).__name__}, which has no forward",
            "Shard the modules in it, or the one around it.",
        )


def check_policy(policy: Any) -> None:
    if not isinstance(policy, MixedPrecisionPolicy):
        got = f"got {type(policy).__name__} as mp_policy, expected a MixedPrecisionPolicy"
        refuse(got, "Import it from trireme, or from torch.distributed.fsdp.", kind=TypeError)


def resolve_mesh(mesh: DeviceMesh | None, dp_mesh_dims: object) -> FsdpMesh:
    """``mesh``, or one of all ranks, on the accelerator if their group has an engine for it."""
    if dp_mesh_dims is not None:
        full = full_mesh(mesh, dp_mesh_dims)
        _check_takes_part(full.mesh)
        return FsdpMesh(data_mesh(full), full)
    if mesh is None:
        if not dist.is_initialized():
            refuse(
                "got no mesh and no process group",
                "Call trireme.init() first, or pass mesh=.",
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
    _check_takes_part(mesh)
    return FsdpMesh(mesh)


def _check_takes_part(mesh: DeviceMesh) -> None:
    if dist.get_rank() not in ranks_of(mesh):
        refuse(f"got {mesh}, in which this rank is not", "Call fully_shard on its ranks only.")


def _default_device_type() -> str:
    group = dist.group.WORLD
    kinds = {device.type for device in group._device_types} if group is not None else set()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in kinds else "cpu"


def resolve_reshard(
    reshard_after_forward: bool | int | None, world: int
) -> tuple[bool | None, int]:
    """Whether a unit reshards after forward (None if that depends on whether it is the root), and
    among how many ranks; 0: all."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, 0
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
    is_part = 1 < reshard_after_forward < world
    return reshard_after_forward > 1, reshard_after_forward if is_part else 0


def check_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    if unit_of(param) is not None:
        refuse(
            f"got '{name}', which is in an outer unit already",
            "Call fully_shard on inner modules before outer ones.",
        )
    local = local_of(param)
    if hasattr(local, "fsdp_pre_all_gather") or is_traceable_wrapper_subclass(local):
        refuse(
            f"got '{name}' as {type(local).__name__}, a tensor subclass that would be lost",
            "Shard it with torch's fully_shard, or make it a plain tensor before.",
            kind=NotImplementedError,
        )
    if param.layout != torch.strided:
        got = f"got '{name}' of layout {param.layout}, expected a dense one"
        refuse(got, "Make it dense.", kind=NotImplementedError)
    own = local.device
    if own.type not in ("cpu", "meta", device.type):
        refuse(
            f"got '{name}' on {own}, expected it on {device}, where the mesh is",
            "Move the module, or pass a mesh of its device.",
        )


def chosen_grad_dtype(name: str, param: nn.Parameter) -> torch.dtype | None:
    """The dtype that the user has set for gradients; None if that is the parameter's own."""
    dtype: torch.dtype | None = param.grad_dtype
    if dtype is None:
        refuse(
            f"got '{name}' with grad_dtype=None, expected one that its gradients have on all ranks",
            "Set grad_dtype=torch.float32.",
            kind=NotImplementedError,
        )
    is_chosen = getattr(param, "_has_grad_dtype_override", dtype != param.dtype)
    return dtype if is_chosen else None


def resolve_placement(
    name: str, placement: Any, default: FsdpMesh, others: dict[DeviceMesh, FsdpMesh]
) -> tuple[Any, FsdpMesh]:
    """Returns what ``shard_placement_fn`` says of a parameter: a Shard or None, and over which
    mesh. ``others``: meshes other than ``default`` that were asked for already. Collective if this
    one is a new one."""
    if not hasattr(placement, "mesh_info"):  # a ShardPlacementResult of torch has it
        return placement, default
    info = placement.mesh_info
    mesh = getattr(info, "mesh", None)
    if mesh == default.mesh and _is_sharded_last(info):
        return placement.placement, default
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2) or not _is_sharded_last(info):
        refuse(
            f"got a placement of '{name}' by {info!r}, expected FSDPMeshInfo over a mesh of 1 "
            "dimension, or HSDPMeshInfo over (replicated, sharded)",
            "Pass FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0).",
        )
    if mesh not in others:
        _check_takes_part(mesh)
        others[mesh] = FsdpMesh(mesh)
    return placement.placement, others[mesh]


def _is_sharded_last(info: Any) -> bool:
    return bool(getattr(info, "shard_mesh_dim", None) == info.mesh.ndim - 1)


def shard_dim(name: str, param: nn.Parameter, placement: Any) -> int:
    """The dimension of ``param`` that is sharded."""
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        refuse(
            f"got {placement!r} as placement of '{name}', expected Shard(dim) or None",
            "Return torch.distributed.tensor.Shard.",
        )
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(param.ndim, 1):
        refuse(
            f"got {placement!r} for '{name}' of shape {tuple(param.shape)}",
            "Choose one of its dimensions.",
            kind=AssertionError,  # torch raises this kind
        )
    return dim


def check_outermost(unit: FsdpUnit, call: str) -> None:
    """What all units have in common is said to the outermost one."""
    if unit.root is not None and not unit.is_root:
        next_step = "Call it on the outermost one."
        refuse(f"got {call}() of an inner unit", next_step, kind=RuntimeError)


def check_mesh_within(unit: FsdpUnit, root: FsdpUnit) -> None:
    """The ranks of a unit are among those of the outermost one, on its device."""
    own, all_ = unit.mesh, root.mesh
    if own.ranks <= all_.ranks and own.device == all_.device:
        return
    refuse(
        f"got a unit of {type(unit.modules[0]).__name__} on ranks {sorted(own.ranks)} of "
        f"{own.device}, expected some of {sorted(all_.ranks)} on {all_.device}, over which the "
        "outermost unit is sharded",
        "Shard the outermost module over a mesh of all ranks that train it.",
    )


def check_kinds(
    modules: Sequence[nn.Module], roots: Sequence[nn.Module], names: dict[nn.Module, str]
) -> None:
    """Refuses modules in a unit that other classes average, or that take no hooks."""
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            got = (
                f"got a DistributedDataParallel at '{names[module]}', which averages gradients, too"
            )
            refuse(got, "Shard the module in it.")
        # A traced one inside of a unit shows what it is given.
        refused = torch.jit.ScriptModule if module in roots else torch.jit.RecursiveScriptModule
        if isinstance(module, refused):
            refuse(
                f"got a ScriptModule at '{names[module]}', whose parameters nobody can exchange",
                "Shard the module before it is scripted or traced: leave it in Python.",
                kind=RuntimeError,
            )


def check_units(modules: Sequence[nn.Module], is_unit: Callable[[nn.Module], bool]) -> None:
    """No module may be a unit already."""
    for module in modules:
        if is_unit(module):
            refuse(
                f"got {type(module).__name__}, which is sharded already",
                "Call fully_shard once per module, inner modules first.",
                kind=AssertionError,  # torch raises this kind
            )


def _place_of(name: str, module: nn.Module, names: dict[nn.Module, str]) -> str:
    """Where a parameter is; what was sharded itself has no name, and is described."""
    if names[module]:
        return f"'{names[module]}.{name}'"
    return f"'{name}' of {type(module).__name__}({module.extra_repr()})"


def check_free(
    modules: Sequence[nn.Module], inner_units: Sequence[Any], names: dict[nn.Module, str]
) -> None:
    """No parameter may hang in two units."""
    taken = {id(param.sharded): unit for unit in inner_units for param in unit.params}
    for module in modules:
        for name, param in module._parameters.items():
            if param is not None and (id(param) in taken or hasattr(param, "_trireme_sharded")):
                refuse(
                    f"got {_place_of(name, module, names)}, which an inner unit shares",
                    "Put both modules into one unit: fully_shard([a, b]).",
                )
