"""``torch.nn.parallel``'s scatter and gather, also for the CPU and for dataclasses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from trireme._data_parallel import refuse
from trireme._data_parallel.devices import DeviceLike, to_device
from trireme._data_parallel.nested import differ, matching_tensors, tensors_in, with_tensors
from trireme._data_parallel.targets import moved, target_devices, wrapped_dim

T = TypeVar("T")

_RETURN_PARTS = "Return from forward what can be put together along the batch."
_SCALARS = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; will instead "
    "unsqueeze and return a vector."
)


@overload
def scatter(  # type: ignore[overload-overlap]
    inputs: Tensor, target_gpus: Sequence[DeviceLike], dim: int = ...
) -> tuple[Tensor, ...]: ...


@overload
def scatter(inputs: T, target_gpus: Sequence[DeviceLike], dim: int = ...) -> list[T]: ...


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> Any:
    """Replaces ``torch.nn.parallel.scatter``: cuts the tensors in ``inputs``, one part per device.

    Tensors in nested tuples, lists, mappings and dataclasses are cut along ``dim`` as
    ``torch.chunk`` cuts them: fewer parts where rows run out, and empty ones of an empty tensor.
    0-dim tensors go to all (torch raises), and sparse COO ones are cut, too. What is no tensor is
    handed on by reference to all, and containers are copied. Differentiable, as often as wanted.

    Args:
        target_gpus: ints (accelerators), -1 or ``"cpu"``, ``torch.device``; also the same twice.

    Returns:
        A tuple for one tensor, otherwise a list of objects like ``inputs``.

    Raises:
        TypeError, ValueError: no or unknown devices; a ``dim`` out of range; tensors that would
            give different numbers of parts, of which torch loses the last rows; a PackedSequence.

    Cost: on the device of an input its parts are views, which share memory with it; one copy each
    otherwise, for which the host does not wait.
    """
    devices = target_devices(target_gpus, "target_gpus")
    if isinstance(inputs, Tensor):
        return tuple(_parts(inputs, devices, dim))
    return _scatter_nested(inputs, devices, dim)


def scatter_kwargs(
    inputs: Any,
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Replaces ``torch.nn.parallel.scatter_kwargs``: `scatter` of both, as many parts of each.

    Nothing at all gives no parts: two empty tuples.
    """
    devices = target_devices(target_gpus, "target_gpus")
    positional = () if inputs is None else inputs
    if not isinstance(positional, Tensor) and not positional and not kwargs:
        return (), ()
    both = _scatter_nested((positional, kwargs or {}), devices, dim)
    own_kwargs = tuple(part for _, part in both) if kwargs else tuple({} for _ in both)
    return tuple(part for part, _ in both), own_kwargs


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Replaces ``torch.nn.parallel.gather``: one object out of one per replica.

    Each tensor is that of all ``outputs`` one after another along ``dim``, on ``target_device``;
    0-dim ones become a vector, with torch's warning. The structure is that of the first; mappings
    are matched by key. None stays None, and so do equal numbers, strings and the like, for which
    torch raises. Differentiable, as often as wanted.

    Raises:
        TypeError, ValueError: nothing to gather; an unknown device; a ``dim`` out of range; other
            structures, values, dtypes or shapes than from the first, with place and replica.

    Cost: one copy of every tensor, two of those from elsewhere.
    """
    device = to_device(target_device)
    if not outputs:
        refuse(
            "got no outputs to gather, expected one per replica",
            "Give what parallel_apply returned.",
        )
    names = [f"replica {i} of {len(outputs)}" for i in range(len(outputs))]
    groups = list(zip(*matching_tensors(outputs, names), strict=True))
    for i, parts in enumerate(groups):
        _check_parts(parts, dim, i, names)
    if any(parts[0].dim() == 0 for parts in groups):
        warnings.warn(_SCALARS, stacklevel=2)
    return with_tensors(outputs[0], iter([_joined(parts, device, dim) for parts in groups]))


def _scatter_nested(inputs: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    tensors = tensors_in(inputs)
    parts = [_parts(tensor, devices, dim) for tensor in tensors]
    cut = [i for i, tensor in enumerate(tensors) if tensor.dim() > 0]
    counts = [len(parts[i]) for i in cut]
    if len(set(counts)) > 1:
        rows = [tensors[i].size(dim) for i in cut]
        refuse(
            f"got tensors of {rows} rows along dim {dim}, which make {counts} parts for "
            f"{len(devices)} devices, expected as many of each",
            "Give all inputs the same batch size, or a 0-dim tensor, which all get.",
        )
    count = counts[0] if counts else len(devices)
    return [with_tensors(inputs, iter([part[i] for part in parts])) for i in range(count)]


def _parts(tensor: Tensor, devices: Sequence[torch.device], dim: int) -> list[Tensor]:
    if tensor.dim() == 0:
        return [moved(tensor, device) for device in devices]
    along = wrapped_dim(tensor, dim, "an input")
    dense = tensor.layout == torch.strided
    if not dense and tensor.requires_grad and torch.is_grad_enabled():
        refuse(
            f"got an input of {tensor.layout} that requires a gradient, expected a dense one: "
            "torch cannot put sparse gradients together",
            "Call to_dense() or detach() before.",
        )
    # Each a view of its own: of those that torch.chunk makes together none may be written in place.
    narrow = Tensor.narrow if dense else Tensor.narrow_copy
    parts: list[Tensor] = []
    begin = 0
    # Only counted: torch.chunk cuts no sparse tensor.
    chunks = torch.empty(tensor.size(along), device="meta").chunk(len(devices))
    for chunk, device in zip(chunks, devices, strict=False):
        parts.append(moved(narrow(tensor, along, begin, len(chunk)), device))
        begin += len(chunk)
    return parts


def _check_parts(parts: Sequence[Tensor], dim: int, number: int, names: Sequence[str]) -> None:
    first = parts[0]
    along = wrapped_dim(first, dim, "an output") if first.dim() > 0 else 0
    place = f"output tensor {number}"
    for part, name in zip(parts, names, strict=True):
        who = name, names[0]
        if (part.dtype, part.layout) != (first.dtype, first.layout):
            got, expected = f"{part.dtype}, {part.layout}", f"{first.dtype}, {first.layout}"
            differ(place, got, expected, who, next_step=_RETURN_PARTS, kind=TypeError)
        theirs, ours = list(part.shape), list(first.shape)
        if theirs[:along] + theirs[along + 1 :] != ours[:along] + ours[along + 1 :] or (
            len(theirs) != len(ours)
        ):
            got, expected = f"shape {theirs}", f"one like {ours} but for dim {dim}"
            differ(place, got, expected, who, next_step=_RETURN_PARTS)


def _joined(parts: Sequence[Tensor], device: torch.device, dim: int) -> Tensor:
    here = [moved(part, device) for part in parts]
    return torch.stack(here) if here[0].dim() == 0 else torch.cat(here, dim)
