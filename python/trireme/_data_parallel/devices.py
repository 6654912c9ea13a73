"""Which devices the replicas of DataParallel are on, and how many threads each has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NoReturn

import torch
from torch import nn

from trireme import _C
from trireme._data_parallel import refuse

DeviceLike = int | str | torch.device


def to_device(one: DeviceLike) -> torch.device:
    """An int is an accelerator, -1 the CPU, as in torch.nn.parallel.

    Raises:
        TypeError, ValueError: something else, or a device that this machine has not.
    """
    if isinstance(one, bool) or not isinstance(one, (int, str, torch.device)):
        _no_device(TypeError, f"{one!r} as a device", "an int, a str or a torch.device")
    if one == -1:
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if isinstance(one, int):
        if kind is None:
            _no_device(ValueError, f"device {one}", "the CPU: torch sees no accelerator here")
        _check_number(one, f"device {one}")  # before torch, which keeps 8 bits of it
        device = torch.device(kind.type, one)
    else:
        device = torch.device(one)
    if device.type == "cpu":
        return torch.device("cpu")
    if kind is None or device.type != kind.type:
        _no_device(
            ValueError, f"device '{device}'", "the CPU or an accelerator that torch sees here"
        )
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    _check_number(device.index, f"device '{device}'")
    return device


def _check_number(number: int, got: str) -> None:
    if not 0 <= number < torch.accelerator.device_count():
        _no_device(ValueError, got, f"one of {torch.accelerator.device_count()}")


def devices_of_replicas(
    module: nn.Module, device_ids: Sequence[DeviceLike] | None, replicas: int | None
) -> list[torch.device]:
    """One device per replica.

    Raises:
        TypeError, ValueError: none, unknown ones, the CPU beside accelerators, or two counts.
    """
    if replicas is not None and (isinstance(replicas, bool) or not isinstance(replicas, int)):
        _no_device(TypeError, f"replicas={replicas!r}", "an int")
    if replicas is not None and replicas < 1:
        _no_device(ValueError, f"replicas={replicas}", "at least 1")
    if device_ids is None:
        return default_devices(module, replicas, _C.default_replicas(torch.get_num_threads()))
    devices = [to_device(device) for device in device_ids]
    if not devices:
        _no_device(ValueError, "device_ids=[]", "at least one device")
    if replicas is not None and replicas != len(devices):
        _no_device(ValueError, f"replicas={replicas} and {len(devices)} device_ids", "one number")
    if len({device.type for device in devices}) > 1:
        _no_device(ValueError, f"device_ids on {[str(d) for d in devices]}", "one kind of device")
    return devices


def threads_of_replicas(devices: Sequence[torch.device]) -> list[int]:
    """Intra-op threads for each: those of the caller, shared out, at least one each."""
    return _C.intra_op_threads_of(torch.get_num_threads(), len(devices))


def default_devices(module: nn.Module, replicas: int | None, on_cpu: int) -> list[torch.device]:
    """Returns one device per replica; where their number is not given, as many as there are
    accelerators, or ``on_cpu`` for a module on the CPU."""
    first = next(chain(module.parameters(), module.buffers()), None)
    if first is None or first.device.type == "cpu":
        return [torch.device("cpu")] * (replicas or on_cpu)
    to_device(first.device)  # refuses "meta"
    return [to_device(i) for i in range(replicas or torch.accelerator.device_count())]


def _no_device(kind: type[Exception], got: str, expected: str) -> NoReturn:
    refuse(
        f"got {got}, expected {expected}",
        "Name devices that exist, or on a machine without accelerators say replicas=n.",
        kind=kind,
    )
