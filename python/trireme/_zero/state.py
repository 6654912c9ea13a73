"""The state of a sharded optimizer as one of the whole parameters, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from trireme._C import ShardedParameter, gather_states
from trireme._core.group_communicator import communicator_of
from trireme._core.owners import hyperparameters
from trireme._zero import refuse
from trireme._zero.agreement import together


@dataclass
class ShardLayout:
    """All parameters of an optimizer in the order of its groups."""

    parameters: list[ShardedParameter]
    shards: list[torch.Tensor]
    """This rank's; without elements where it owns none."""
    group_sizes: list[int]
    device: torch.device


def consolidate(
    optimizer: Optimizer, layout: ShardLayout, group: dist.ProcessGroup, to: int
) -> dict[int, dict[str, Any]] | None:
    """Returns the state by parameter index on rank ``to``, None elsewhere. Collective."""
    if not 0 <= to < group.size():
        refuse(f"got rank {to} to consolidate on", f"Pass 0 to {group.size() - 1}.", group)
    own = []
    with together("a state", layout.device, group):
        for shard in layout.shards:
            state = optimizer.state.get(shard, {})
            own.append({name: _to_core(name, value, group) for name, value in state.items()})
    states = gather_states(own, layout.parameters, communicator_of(group), to)
    if group.rank() != to:
        return None
    return {
        index: {name: _from_core(value) for name, value in state.items()}
        for index, state in enumerate(states)
        if state
    }


def _to_core(name: str, value: Any, group: dist.ProcessGroup) -> torch.Tensor | str:
    """Says as JSON what is no tensor."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        return json.dumps(value)
    except TypeError:
        refuse(
            f"got optimizer state '{name}' of type {type(value).__name__}, expected a tensor, "
            "number, text or list of them",
            "Keep it in tensors.",
            group,
            kind=TypeError,
        )


def _from_core(value: torch.Tensor | str) -> Any:
    return json.loads(value) if isinstance(value, str) else value


class LoadedState:
    """A whole state dict, checked against a layout, of which a rank takes its part."""

    def __init__(
        self, state_dict: dict[str, Any], layout: ShardLayout, group: dist.ProcessGroup
    ) -> None:
        for key in ("state", "param_groups"):
            if key not in state_dict:
                got = f"got a state dict without '{key}'"
                refuse(got, "Load what the state_dict() of an optimizer returns.", group)
        sizes = [len(param_group["params"]) for param_group in state_dict["param_groups"]]
        if sizes != layout.group_sizes:
            refuse(
                f"got a state dict of groups of {sizes} parameters, expected {layout.group_sizes}",
                "Load the state of the same model and groups.",
                group,
            )
        self.param_groups = [
            hyperparameters(param_group) for param_group in state_dict["param_groups"]
        ]
        # Numbers need not be consecutive: what they number is told by the groups.
        order = [
            number for param_group in state_dict["param_groups"] for number in param_group["params"]
        ]
        state = state_dict["state"]
        self._shards = layout.shards
        self._states = [
            _own_part(state.get(number) or {}, parameter, group)
            for number, parameter in zip(order, layout.parameters, strict=True)
        ]

    def put_into(self, optimizer: Optimizer) -> None:
        """Gives ``optimizer``, which works on the shards, what belongs to them."""
        shards = [
            shard for param_group in optimizer.param_groups for shard in param_group["params"]
        ]
        numbers = {id(shard): number for number, shard in enumerate(shards)}
        taken = {
            numbers[id(shard)]: state
            for shard, state in zip(self._shards, self._states, strict=True)
            if state and id(shard) in numbers
        }
        optimizer.load_state_dict(
            {"state": taken, "param_groups": optimizer.state_dict()["param_groups"]}
        )


def _own_part(
    state: dict[str, Any], parameter: ShardedParameter, group: dist.ProcessGroup
) -> dict[str, Any]:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {**state, **parameter.own_part(tensors, communicator_of(group))}
