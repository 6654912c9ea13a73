"""The state of a sharded optimizer as one of the whole parameters, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from trireme._core.errors import refuse
from trireme._core.group_communicator import device_of_numbers
from trireme._zero.agreement import gather_values, raise_together


@dataclass
class ShardLayout:
    """All parameters of an optimizer in the order of its groups, and who owns what of them."""

    names: list[str]
    parameters: list[torch.Tensor]
    shards: list[torch.Tensor]
    """This rank's; without elements where it owns none."""
    ranges: list[list[tuple[int, int]]]
    """By parameter and rank: first element and how many."""
    group_sizes: list[int]

    def owners(self, index: int) -> list[int]:
        """Ranks that own some of a parameter, ascending; none of one without elements."""
        return [rank for rank, (_, numel) in enumerate(self.ranges[index]) if numel > 0]

    def shard_shape(self, index: int, rank: int) -> torch.Size:
        """Of the tensor that ``rank`` holds of a parameter."""
        shape = self.parameters[index].shape
        numel = self.ranges[index][rank][1]
        if numel == self.parameters[index].numel():
            return shape
        return torch.Size((numel // shape[1:].numel(), *shape[1:]))


# from shards


def consolidate(
    optimizer: Optimizer, layout: ShardLayout, group: dist.ProcessGroup, to: int
) -> dict[int, dict[str, Any]] | None:
    """The state by parameter index on rank ``to``, None elsewhere. Collective."""
    if not 0 <= to < group.size():
        refuse("zero", f"got rank {to} to consolidate on", f"Pass 0 to {group.size() - 1}.", group)
    mine = [dict(optimizer.state.get(shard, {})) for shard in layout.shards]
    device = layout.parameters[0].device
    error, descriptions = None, None
    try:
        descriptions = [_describe(one, group) for one in mine]
    except TypeError as raised:
        error = raised
    raise_together(error, "a state", device, group)
    described = gather_values(descriptions, device, group)
    state: dict[int, dict[str, Any]] = {}
    for index in range(len(layout.parameters)):
        parts: dict[int, dict[str, Any]] = {}
        for rank in layout.owners(index):
            entries = described[rank][index]
            if rank == group.rank():
                _send(mine[index], entries, to, group)
            if group.rank() != to:
                continue
            parts[rank] = (
                {name: _to_cpu(mine[index][name]) for name in entries}
                if rank == to
                else _receive(entries, rank, group, device)
            )
        if group.rank() == to and any(parts.values()):
            state[index] = _join(index, parts, layout)
    return state if group.rank() == to else None


def _describe(state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for name, value in sorted(state.items()):
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            described[name] = {"shape": list(value.shape), "dtype": dtype, "on_cpu": value.is_cpu}
            continue
        try:
            json.dumps(value)
        except TypeError:
            refuse(
                "zero",
                f"got optimizer state '{name}' of type {type(value).__name__}, expected a tensor, "
                "number, text or list of them",
                "Keep it in tensors.",
                group,
                kind=TypeError,
            )
        described[name] = {"value": value}
    return described


def _send(
    state: dict[str, Any], entries: dict[str, Any], to: int, group: dist.ProcessGroup
) -> None:
    if group.rank() == to:
        return
    for name, entry in entries.items():
        if "shape" in entry and state[name].numel() > 0:
            wire = _wire_device(entry, group, state[name].device)
            dist.send(state[name].to(wire).contiguous(), group=group, group_dst=to)


def _receive(
    entries: dict[str, Any], rank: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, entry in entries.items():
        if "value" in entry:
            state[name] = entry["value"]
            continue
        tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        if tensor.numel() > 0:
            wire = tensor.to(_wire_device(entry, group, device))
            dist.recv(wire, group=group, group_src=rank)
            tensor = wire.cpu()
        state[name] = tensor
    return state


def _wire_device(
    entry: dict[str, Any], group: dist.ProcessGroup, device: torch.device
) -> torch.device:
    """Small counters lie on the CPU, also where the group moves tensors of a GPU only."""
    return device_of_numbers(group) if entry["on_cpu"] else device


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _join(index: int, parts: dict[int, dict[str, Any]], layout: ShardLayout) -> dict[str, Any]:
    """What lies along the shards is put together, what does not is the same on all."""
    first = parts[min(parts)]
    joined: dict[str, Any] = {}
    for name, value in first.items():
        along = (
            len(parts) > 1
            and isinstance(value, torch.Tensor)
            and value.shape == layout.shard_shape(index, min(parts))
        )
        joined[name] = torch.cat([parts[rank][name] for rank in sorted(parts)]) if along else value
    return joined


# to shards


class LoadedState:
    """A whole state dict, checked against a layout, of which a rank takes its part."""

    def __init__(
        self, state_dict: dict[str, Any], layout: ShardLayout, group: dist.ProcessGroup
    ) -> None:
        self._layout = layout
        self._group = group
        for key in ("state", "param_groups"):
            if key not in state_dict:
                got = f"got a state dict without '{key}'"
                refuse("zero", got, "Load what the state_dict() of an optimizer returns.", group)
        sizes = [len(one["params"]) for one in state_dict["param_groups"]]
        if sizes != layout.group_sizes:
            refuse(
                "zero",
                f"got a state dict of groups of {sizes} parameters, expected {layout.group_sizes}",
                "Load the state of the same model and groups.",
                group,
            )
        self.param_groups = [
            {key: value for key, value in one.items() if key not in ("params", "param_names")}
            for one in state_dict["param_groups"]
        ]
        # Numbers need not be consecutive: what they number is told by the groups.
        order = [number for one in state_dict["param_groups"] for number in one["params"]]
        state = state_dict["state"]
        self._state = [state.get(number) or {} for number in order]
        for index, entries in enumerate(self._state):
            self._check(index, entries)

    def _check(self, index: int, entries: dict[str, Any]) -> None:
        shape = self._layout.parameters[index].shape
        for name, value in entries.items():
            has_shape = isinstance(value, torch.Tensor) and value.dim() > 0
            # An optimizer that works on whole parameters may keep what it likes.
            if not has_shape or value.shape == shape or len(self._layout.owners(index)) < 2:
                continue
            refuse(
                "zero",
                f"got state '{name}' of shape {tuple(value.shape)} for "
                f"'{self._layout.names[index]}' of shape {tuple(shape)}",
                "Load the state of the same model.",
                self._group,
            )

    def put_into(self, optimizer: Optimizer) -> None:
        """Gives ``optimizer``, which works on the shards, what belongs to them."""
        numbers = {
            id(parameter): number
            for number, parameter in enumerate(
                parameter for one in optimizer.param_groups for parameter in one["params"]
            )
        }
        taken = {}
        for index, entries in enumerate(self._state):
            number = numbers.get(id(self._layout.shards[index]))
            if number is not None and entries:
                taken[number] = {name: self._part(index, v) for name, v in entries.items()}
        optimizer.load_state_dict(
            {"state": taken, "param_groups": optimizer.state_dict()["param_groups"]}
        )

    def _part(self, index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        parameter = self._layout.parameters[index]
        begin, numel = self._layout.ranges[index][self._group.rank()]
        if value.shape != parameter.shape or numel == parameter.numel():
            return value.clone()
        shape = self._layout.shards[index].shape
        return value.contiguous().view(-1)[begin : begin + numel].view(shape).clone()
