"""``torch.nn.parallel.comm``'s copies and sums of many tensors, also for the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from trireme._data_parallel import refuse
from trireme._data_parallel.devices import DeviceLike, to_device
from trireme._data_parallel.targets import moved, target_devices

# What the operators trireme::flatten and trireme::unflatten take.
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Iterable[Tensor], devices: Sequence[DeviceLike], buffer_size: int = 10485760
) -> tuple[list[Tensor], ...]:
    """Replaces ``torch.nn.parallel.comm.broadcast_coalesced``: the same tensors on each device.

    Dense and sparse ones of any dtype, also complex, all on one device, which need not be among
    ``devices``. Without a graph.

    Args:
        devices: ints (accelerators), -1 or ``"cpu"``, ``torch.device``; also the same twice.
        buffer_size: bytes up to which tensors of one dtype travel together.

    Returns:
        A list per device, in the order of ``tensors``: the tensors themselves the first time that
        it is theirs, copies otherwise.

    Raises:
        TypeError, ValueError: no tensors but something else; several devices; no or unknown ones.

    Cost: one copy on the own device; to another one per ``buffer_size`` and dtype of contiguous
    tensors, which are packed and unpacked there, and one for each other tensor. The host does not
    wait.
    """
    targets = target_devices(devices, "devices")
    given = _checked(tensors, "tensors")
    results: list[list[Tensor]] = [[] for _ in targets]
    if not given:
        return tuple(results)
    source = _one_device(given)
    placed = [list(given) for _ in targets]
    whole = targets.index(source) if source in targets else -1
    for group in _together(given, [_joins(tensor) for tensor in given], buffer_size):
        own = [given[i] for i in group]
        flat = _flat(own) if len(own) > 1 and any(target != source for target in targets) else None
        for position, device in enumerate(targets):
            if position == whole:
                continue
            if flat is None or device == source:
                copies = [moved(tensor.detach(), device, copy=True) for tensor in own]
            else:
                copies = _unflat(moved(flat, device), own)
            for i, copy in zip(group, copies, strict=True):
                placed[position][i] = copy
    return tuple(placed)


@torch.no_grad()
def reduce_add_coalesced(
    inputs: Iterable[Iterable[Tensor]],
    destination: DeviceLike | None = None,
    buffer_size: int = 10485760,
) -> tuple[Tensor, ...]:
    """Replaces ``torch.nn.parallel.comm.reduce_add_coalesced``: sums over the lists in ``inputs``.

    Position by position, in the order of ``inputs``: the same bits in every run. A sum is sparse if
    all its parts are, and otherwise dense. Without a graph.

    Args:
        inputs: lists of as many tensors, alike in shape and dtype; each on any device.
        destination: where the sums are, which need not be that of an input. None: the current
            accelerator if any input is on one, otherwise the CPU.
        buffer_size: bytes up to which tensors of one dtype are summed together.

    Returns:
        New tensors, in the order of those in each list.

    Raises:
        TypeError, ValueError: nothing to sum; something else than tensors; other lengths, shapes or
            dtypes than in the first list; an unknown device.

    Cost: one pass over each input; of contiguous tensors up to ``buffer_size`` at a time, with one
    copy for all from another device.
    """
    lists = [_checked(given, f"input {i}") for i, given in enumerate(inputs)]
    if not lists:
        refuse(
            "got no inputs to sum, expected at least one list of tensors",
            "Give one list per device.",
        )
    _check_alike(lists)
    target = _destination(lists, destination)
    columns = list(zip(*lists, strict=True))
    sums = list(lists[0])
    for group in _together(lists[0], [all(map(_joins, column)) for column in columns], buffer_size):
        if len(group) == 1:
            sums[group[0]] = _sum(columns[group[0]], target)
            continue
        together = _sum_together([[tensors[i] for i in group] for tensors in lists], target)
        for i, total in zip(group, together, strict=True):
            sums[i] = total
    return tuple(sums)


def _joins(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.is_contiguous()


def _together(tensors: Sequence[Tensor], joins: Sequence[bool], limit: int) -> list[list[int]]:
    """Lists indices of what travels together: of one dtype, up to ``limit`` bytes; others alone."""
    groups: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        if not joins[i]:
            groups.append([i])
            continue
        group, filled = filling.get(tensor.dtype, ([], 0))
        if group and filled + tensor.nbytes > limit:
            groups.append(group)
            group, filled = [], 0
        group.append(i)
        filling[tensor.dtype] = group, filled + tensor.nbytes
    return groups + [group for group, _ in filling.values()]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Returns new memory with one after another."""
    dtype = tensors[0].dtype
    if dtype in _FLOATING or dtype in _COMPLEX:
        flat: Tensor = torch.ops.trireme.flatten(tensors, dtype.to_real())
        return flat
    return _flatten_dense_tensors(tensors)


def _unflat(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    dtype = like[0].dtype
    if dtype not in _FLOATING and dtype not in _COMPLEX:
        # Parts have version counters of their own: no other tensor shows the memory of one.
        return [part.data for part in _unflatten_dense_tensors(flat, like)]
    outputs = [torch.empty(tensor.shape, dtype=dtype, device=flat.device) for tensor in like]
    torch.ops.trireme.unflatten(flat, outputs)
    return outputs


def _sum(parts: Sequence[Tensor], target: torch.device) -> Tensor:
    if len({part.layout for part in parts}) > 1:
        parts = [part if part.layout == torch.strided else part.to_dense() for part in parts]
    total = moved(parts[0].detach(), target, copy=True)
    for part in parts[1:]:
        own = moved(part.detach(), target)
        total = total.add_(own) if total.layout == torch.strided else total + own
    return total


def _sum_together(lists: Sequence[Sequence[Tensor]], target: torch.device) -> list[Tensor]:
    dtype = lists[0][0].dtype
    total = moved(_flat(lists[0]), target)
    for own in lists[1:]:
        on_target = all(tensor.device == target for tensor in own)
        if on_target and (dtype in _FLOATING or dtype in _COMPLEX):
            torch.ops.trireme.flatten_accumulate(own, total)
        else:
            total.add_(moved(_flat(own), target))
    return _unflat(total, lists[0])


def _destination(lists: Sequence[Sequence[Tensor]], given: DeviceLike | None) -> torch.device:
    if given is not None:
        return to_device(given)
    for own in lists:
        for tensor in own:
            if tensor.device.type != "cpu":
                return to_device(tensor.device.type)
    return torch.device("cpu")


def _checked(tensors: Iterable[Tensor], name: str) -> list[Tensor]:
    """Returns ``tensors`` as a list."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for i, tensor in enumerate(given):
        if isinstance(tensors, Tensor) or not isinstance(tensor, Tensor):
            got = "a tensor" if isinstance(tensors, Tensor) else f"{type(tensor).__name__} at {i}"
            refuse(
                f"got {got} as {name}, expected a sequence of tensors",
                "Put the tensors in a list.",
                kind=TypeError,
            )
    return given


def _one_device(tensors: Sequence[Tensor]) -> torch.device:
    found = {tensor.device for tensor in tensors}
    if len(found) > 1:
        refuse(
            f"got tensors on {', '.join(sorted(map(str, found)))}, expected one device",
            "Broadcast those of each device for themselves.",
        )
    return tensors[0].device


def _check_alike(lists: Sequence[Sequence[Tensor]]) -> None:
    for number, own in enumerate(lists):
        if len(own) != len(lists[0]):
            got, expected = f"{len(own)} tensors", str(len(lists[0]))
            _differ(f"{got} in input {number}", expected)
        for i, (theirs, ours) in enumerate(zip(own, lists[0], strict=True)):
            if theirs.dtype != ours.dtype:
                got = f"{theirs.dtype} for tensor {i} of input {number}"
                _differ(got, str(ours.dtype), kind=TypeError)
            if theirs.shape != ours.shape:
                got = f"shape {list(theirs.shape)} for tensor {i} of input {number}"
                _differ(got, str(list(ours.shape)))


def _differ(got: str, expected: str, *, kind: type[Exception] = ValueError) -> NoReturn:
    refuse(
        f"got {got}, expected {expected} as in input 0",
        "Give lists of gradients of the same parameters.",
        kind=kind,
    )
