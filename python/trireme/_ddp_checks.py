"""Checks of what a caller gives to DistributedDataParallel, each with its message."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _get_device_index
from torch.distributed.device_mesh import DeviceMesh


def _where(group: dist.ProcessGroup) -> str:
    return f"(rank {group.rank()} of {group.size()})"


def resolve_process_group(
    process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None, module: nn.Module
) -> dist.ProcessGroup:
    """The group to train over, from whichever of the two arguments was given."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"[ddp] got {type(module).__name__} as module, expected a torch.nn.Module. Pass the model itself."
        )
    if process_group is not None and device_mesh is not None:
        raise ValueError("[ddp] got both process_group and device_mesh, expected one. Leave one of them out.")
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 1:
            raise ValueError(f"[ddp] got {device_mesh!r}, expected a 1-D DeviceMesh. Slice the mesh by its name.")
        root = device_mesh._get_root_mesh()
        if root != device_mesh:  # DDP over one axis, tensor parallelism over another
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        if not dist.is_initialized():
            raise ValueError("[ddp] got no process group, expected an initialised one. Call trireme.init() first.")
        process_group = dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"[ddp] got a process group that rank {dist.get_rank()} is no member of, expected one that contains it. "
            "Wrap the module on the ranks of the group only."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"[ddp] got {type(process_group).__name__} as process_group, expected a torch.distributed.ProcessGroup. "
            "Make one with torch.distributed.new_group()."
        )
    return process_group


def check_module(module: nn.Module, ignored: set[str], group: dist.ProcessGroup) -> None:
    """Refuses modules that cannot be averaged: lazy, without trainable parameters, on several kinds of device."""
    parameters = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"[ddp] got lazy parameter '{name}' without a shape, expected an initialised module {_where(group)}. "
                "Run one forward before wrapping."
            )
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"[ddp] got a module without trainable parameters, expected at least one {_where(group)}. "
            "Use the module as it is: there is nothing to average."
        )
    first_name, first = trainable[0]
    for name, parameter in parameters:
        if parameter.device.type != first.device.type:
            raise ValueError(
                f"[ddp] got parameters on several kinds of device: '{first_name}' on {first.device} but '{name}' on "
                f"{parameter.device} {_where(group)}. Move the whole module to one kind of device."
            )


def check_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    device_type: str,
    is_multi_device: bool,
    group: dist.ProcessGroup,
) -> tuple[list[int] | None, int | None]:
    """Returns (device_ids, output_device) as indices, or (None, None) where the module decides."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"[ddp] got device_ids {list(device_ids)}, expected None or one entry {_where(group)}. "
            "Start one rank per device."
        )
    if not device_ids or device_type == "cpu" or is_multi_device:
        if device_ids or output_device:
            raise ValueError(
                f"[ddp] got device_ids {device_ids} and output_device {output_device} for a module on "
                f"{'several devices' if is_multi_device else device_type}, expected None {_where(group)}. "
                "Leave both out."
            )
        return None, None
    ids = [_get_device_index(device, True) for device in device_ids]
    return ids, ids[0] if output_device is None else _get_device_index(output_device, True)


def check_comm_hook(hook: Callable[..., Any]) -> None:
    """A hook is a callable of (state, bucket); annotations, where present, must be those of torch."""
    if not callable(hook):
        raise TypeError(
            f"[ddp] got {type(hook).__name__} as communication hook, expected a callable (state, bucket). "
            "Pass the function itself."
        )
    signature = inspect.signature(hook)
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    if not takes_any and len(positional) < 2:
        raise TypeError(
            f"[ddp] got a communication hook with parameters {list(signature.parameters)}, expected two: state and "
            "bucket. Give it both, even if it ignores the state."
        )
    empty = inspect.Parameter.empty
    if len(positional) >= 2 and positional[1].annotation not in (empty, dist.GradBucket, "dist.GradBucket"):
        raise ValueError(
            f"[ddp] got annotation {positional[1].annotation} for the bucket, expected torch.distributed.GradBucket. "
            "Correct or remove the annotation."
        )
    future = torch.futures.Future[torch.Tensor]
    if signature.return_annotation not in (empty, future, "torch.futures.Future[torch.Tensor]"):
        raise ValueError(
            f"[ddp] got return annotation {signature.return_annotation}, expected {future}. "
            "Return a future of one tensor, and annotate it so or not at all."
        )
