"""Checks of what a caller gives to DistributedDataParallel, each with its message."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _get_device_index
from torch.distributed import GradBucket
from torch.distributed.device_mesh import DeviceMesh

from trireme._core.compression import Compression, checked
from trireme._ddp import AREA, refuse


def resolve_process_group(
    process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None, module: nn.Module
) -> dist.ProcessGroup:
    """The group to train over, from whichever of the two arguments was given."""
    AREA.expect_module(module)
    if process_group is not None and device_mesh is not None:
        got = "got both process_group and device_mesh, expected one"
        refuse(got, "Leave one of them out.", kind=RuntimeError)
    if device_mesh is not None:
        return _group_of_mesh(device_mesh, module)
    return AREA.expect_group(process_group, "Wrap the module on the ranks of the group only.")


def _group_of_mesh(device_mesh: DeviceMesh, module: nn.Module) -> dist.ProcessGroup:
    is_mesh = isinstance(device_mesh, DeviceMesh)
    if not is_mesh or device_mesh.ndim != 1:
        got = f"got {device_mesh!r} as device_mesh, expected a 1-D DeviceMesh"
        next_step = "Slice the mesh by the name of one dimension."
        refuse(got, next_step, kind=RuntimeError if is_mesh else TypeError)
    if device_mesh._get_root_mesh() != device_mesh:  # over another axis: tensor parallelism
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0)


def check_materialized(module: nn.Module, ignored: set[str], group: dist.ProcessGroup) -> None:
    """Refuses parameters and buffers without a shape or memory. The core checks the rest."""
    named = [
        (name, parameter) for name, parameter in module.named_parameters() if name not in ignored
    ]
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            got = f"got lazy parameter '{name}' without a shape, expected an initialised module"
            refuse(got, "Run one forward before wrapping.", group, kind=RuntimeError)
    if named and named[0][1].is_meta:  # where the ranks would compare what they have
        got = f"got '{named[0][0]}' on the meta device, expected a parameter with memory"
        next_step = "Call module.to_empty(device=...) and initialise it before wrapping."
        is_mixed = not all(parameter.is_meta for _, parameter in named)
        refuse(got, next_step, group, kind=ValueError if is_mixed else RuntimeError)
    for name, buffer in module.named_buffers():
        if (
            buffer.is_meta
            and name not in ignored
            and not all(parameter.is_meta for _, parameter in named)
        ):
            got = f"got buffer '{name}' on the meta device, expected one with memory"
            next_step = "Give it memory and values before wrapping, or leave it out by "
            next_step += "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model()."
            refuse(got, next_step, group, kind=RuntimeError)


def check_batch_norms(module: nn.Module, group: dist.ProcessGroup) -> None:
    """torch's SyncBatchNorm runs on accelerators only, which it says in forward."""
    for name, layer in module.named_modules():
        tensors = (*layer.parameters(), *layer.buffers())
        if type(layer) is nn.SyncBatchNorm and any(tensor.is_cpu for tensor in tensors):
            refuse(
                f"got torch's SyncBatchNorm at '{name}' on the CPU, expected one that runs there",
                "Convert with trireme.SyncBatchNorm.convert_sync_batchnorm(module), which takes "
                "torch's over.",
                group,
            )


def check_bucket_caps(
    cap_mb: object, cap_mb_list: Sequence[object] | None, group: dist.ProcessGroup
) -> None:
    """Caps are positive numbers of MiB."""
    for cap in [*([] if cap_mb is None else [cap_mb]), *(cap_mb_list or ())]:
        if not isinstance(cap, (int, float)):
            got = f"got {type(cap).__name__} as bucket cap, expected a number of MiB"
            refuse(got, "Leave bucket_cap_mb out for the default of 25.", group, kind=TypeError)
        if not cap > 0:
            got = f"got a bucket cap of {cap} MiB, expected a positive number"
            refuse(got, "Leave bucket_cap_mb out for the default of 25.", group)


def check_compression(compression: object, group: dist.ProcessGroup) -> Compression | None:
    """A method of ``trireme.compression``, or None."""
    return checked(compression, functools.partial(refuse, group=group))


def check_delayed(delayed: object, hooked: nn.Parameter | None, group: dist.ProcessGroup) -> None:
    """torch's two arguments for a delayed all-reduce come together."""
    if (delayed is None) != (hooked is None):
        refuse(
            "got one of delay_all_reduce_named_params and param_to_hook_all_reduce, expected "
            "both or neither",
            "Leave both out: nothing needs to be delayed.",
            group,
        )


def check_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    devices: set[torch.device],
    group: dist.ProcessGroup,
) -> tuple[list[int] | None, int | None]:
    """Returns (device_ids, output_device) as indices, or (None, None) where the module decides."""
    if device_ids is not None and len(device_ids) > 1:
        got = f"got device_ids {list(device_ids)}, expected None or one entry"
        refuse(got, "Start one rank per device.", group)
    on_cpu = any(device.type == "cpu" for device in devices)
    if not device_ids or on_cpu or len(devices) > 1:
        if device_ids or output_device:
            refuse(
                f"got device_ids {device_ids} and output_device {output_device} for a module "
                f"on {', '.join(sorted(map(str, devices)))}, expected None",
                "Leave both out.",
                group,
            )
        return None, None
    ids = [_get_device_index(device, True) for device in device_ids]
    return ids, ids[0] if output_device is None else _get_device_index(output_device, True)


def check_comm_hook(hook: Callable[..., Any], group: dist.ProcessGroup) -> None:
    """A hook is a callable of (state, bucket); annotations, where present, must be torch's."""
    if not callable(hook):
        got = (
            f"got {type(hook).__name__} as communication hook, expected a callable (state, bucket)"
        )
        refuse(got, "Pass the function itself.", group, kind=TypeError)
    signature = inspect.signature(hook)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [
        parameter for parameter in signature.parameters.values() if parameter.kind in kinds
    ]
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_POSITIONAL
        for parameter in signature.parameters.values()
    )
    if not takes_any and len(positional) < 2:
        refuse(
            f"got a communication hook with parameters {list(signature.parameters)}, expected "
            "two: state and bucket",
            "Give it both, even if it ignores the state.",
            group,
            kind=TypeError,
        )
    empty = inspect.Parameter.empty
    bucket_types = (empty, GradBucket, "dist.GradBucket", "GradBucket")
    if len(positional) >= 2 and positional[1].annotation not in bucket_types:
        refuse(
            f"got annotation {positional[1].annotation} for the bucket, expected "
            "torch.distributed.GradBucket",
            "Correct or remove the annotation.",
            group,
        )
    future = torch.futures.Future[torch.Tensor]
    if signature.return_annotation not in (empty, future, "torch.futures.Future[torch.Tensor]"):
        refuse(
            f"got return annotation {signature.return_annotation}, expected {future}",
            "Return a future of one tensor, and annotate it so or not at all.",
            group,
        )


def returning_future(hook: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    """``hook``, with what it returns checked: c10d dereferences it unseen."""

    def checked(state: object, bucket: GradBucket) -> Any:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # what Work.get_future() returns, too
            name = getattr(hook, "__qualname__", repr(hook))
            got = f"got {type(future).__name__} from communication hook '{name}', expected a "
            next_step = "Return what get_future() of a collective gives, or Future.then()."
            refuse(got + "torch.futures.Future of one tensor", next_step, group, kind=TypeError)
        return future

    return checked
