"""What callers of the functions of torch.nn.parallel name, checked."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trireme._data_parallel import AREA, refuse
from trireme._data_parallel.devices import DeviceLike, to_device
from trireme._data_parallel.modules import find_refused


def target_devices(given: Iterable[DeviceLike], name: str) -> list[torch.device]:
    """One device for each entry of the argument ``name``; see `to_device`.

    Raises:
        TypeError, ValueError: no sequence, an empty one, or a device that does not exist.
    """
    if isinstance(given, (str, torch.device)) or not isinstance(given, Iterable):
        refuse(
            f"got {given!r} as {name}, expected a sequence of devices",
            f"Give one per part, as in {name}=[0, 1] or ['cpu'] * 2.",
            kind=TypeError,
        )
    devices = [to_device(device) for device in given]
    if not devices:
        refuse(f"got {name}=[], expected at least one device", "Give one per part, or ['cpu'] * n.")
    return devices


def check_replicable(module: nn.Module) -> None:
    """Raises TypeError for what is no module, ValueError for a layer that no replica can have."""
    AREA.expect_module(module)
    refused = find_refused(module)
    if refused is not None:
        refuse(
            f"got {refused[1]} at '{refused[0]}', expected plain modules",
            "Replicate the module before it is scripted, compiled, made parallel or converted to "
            "SyncBatchNorm, and run one forward of lazy ones before.",
        )


def wrapped_dim(tensor: Tensor, dim: int, what: str) -> int:
    """``dim`` counted from the front.

    Raises:
        ValueError: ``tensor``, of one dimension or more, does not have it.
    """
    rank = tensor.dim()
    if not -rank <= dim < rank:
        refuse(
            f"got dim {dim} for {what} of {rank} dimensions, expected {-rank} to {rank - 1}",
            "Give the dimension that holds the batch.",
        )
    return dim % rank


def moved(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """``tensor`` on ``device``; a new one if it is elsewhere, or with ``copy``.

    Nobody waits for copies to an accelerator, which are in order on its stream; the host may read
    what has come to the CPU.
    """
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)
