"""Plain model parallelism: layers on devices, and inputs that follow them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme._core.nested import map_tensors
from trireme._pipeline import AREA, refuse
from trireme._pipeline.schedule import partition

Device = torch.device | str | int
_RANGE = re.compile(r"(.*\.|)(\d+)-(\d+)")


def place(module: nn.Module, placement: Sequence[Device] | Mapping[str, Device]) -> nn.Module:
    """Moves parts of a module to devices; their inputs are moved there when they are called.

    A backward takes the same way back. What is not placed stays where it is. An optimizer is to be
    made afterwards.

    Args:
        module: The model, which is changed.
        placement: A list of devices for a ``torch.nn.Sequential``, over which its layers are dealt
            out evenly and in order; or a dict from names of modules to devices, where
            ``"blocks.0-5"`` names six.

    Returns:
        The module.

    Raises:
        ValueError: an unknown name, one named twice, or a parameter or a buffer that would be on
            two devices.
    """
    AREA.expect_module(module)
    places = _places(module, placement)
    refuse_split(places.items())
    for part, device in places.items():
        part.to(device)
        part.register_forward_pre_hook(functools.partial(_bring, device), with_kwargs=True)
    return module


def _bring(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=device.type != "cpu")

    return map_tensors(args, move), map_tensors(kwargs, move)


def _places(
    module: nn.Module, placement: Sequence[Device] | Mapping[str, Device]
) -> dict[nn.Module, torch.device]:
    if isinstance(placement, Mapping):
        return _named_places(module, placement)
    if isinstance(placement, str) or not isinstance(module, nn.Sequential):
        got = f"got a {type(module).__name__} and {placement!r} as placement"
        refuse(got, "Give a list to a Sequential, or a dict of names.", kind=TypeError)
    devices = [torch.device(device) for device in placement]
    counts = partition([1.0] * len(module), len(devices))
    dealt = [device for device, count in zip(devices, counts, strict=True) for _ in range(count)]
    found: dict[nn.Module, torch.device] = {}
    for (name, layer), device in zip(module._modules.items(), dealt, strict=True):
        assert layer is not None
        if found.setdefault(layer, device) != device and any(True for _ in layer.parameters()):
            refuse(f"got layer '{name}' twice, for two devices", "Place it by name.")
    return found


def _named_places(
    module: nn.Module, placement: Mapping[str, Device]
) -> dict[nn.Module, torch.device]:
    known = dict(module.named_modules())
    found: dict[nn.Module, torch.device] = {}
    taken: dict[str, str] = {}
    for text, device in placement.items():
        for name in _names(text):
            if name not in known:
                children = ", ".join(name for name, _ in module.named_children())
                got = f"got '{name}', which the module does not have, expected names as {children}"
                refuse(got, "Correct the name.")
            for other, its_text in taken.items():
                if name == other or f"{name}.".startswith(f"{other}.") or (
                    f"{other}.".startswith(f"{name}.")
                ):  # fmt: skip
                    got = f"got '{its_text}' and '{text}', which both place '{max(name, other)}'"
                    refuse(got, "Place each part once.")
            taken[name] = text
            found[known[name]] = torch.device(device)
    return found


def _names(text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    prefix, first, last = match.groups()
    names = [f"{prefix}{number}" for number in range(int(first), int(last) + 1)]
    if not names:
        refuse(f"got '{text}', a range without members", "Write the smaller number first.")
    return names


def refuse_split(places: Iterable[tuple[nn.Module, torch.device]]) -> None:
    """Refuses modules for several devices that have a parameter or a buffer in common."""
    holders: dict[Tensor, torch.device] = {}
    for part, device in places:
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if holders.setdefault(tensor, device) != device:
                got = f"got '{name}' in layers for {holders[tensor]} and {device}"
                refuse(got, "Put what layers share on one device.")
