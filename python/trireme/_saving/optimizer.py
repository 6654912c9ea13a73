"""The state of any optimizer by the names of parameters, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trireme._C import CheckpointSource, CheckpointTensor, has_memory
from trireme._core.fused_optimizer import loaded_state_dtype
from trireme._core.owners import ShardedOptimizer, hyperparameters
from trireme._saving.parts import (
    NamedTensor,
    Part,
    Ranks,
    ShardedParts,
    held_of,
    part_of,
    whole,
)

FILE = "optimizer.json"
KIND = "optimizer"


@dataclass(frozen=True)
class Stepped:
    """What the optimizer of this rank steps of one parameter."""

    name: str
    target: torch.Tensor
    """The parameter, or this rank's shard of it."""
    part: Part
    owner: int | None
    """The rank of a sharded optimizer's group that speaks for all about what is no part; None: all
    ranks say the same."""


class OptimizerParts:
    """An optimizer over the parameters of a model, of which a rank may have shards only.

    Raises:
        ValueError: it has a parameter that the model has not; it is torch's own sharded one.
    """

    def __init__(self, optimizer: Optimizer, model: Iterable[NamedTensor], ranks: Ranks) -> None:
        self.ranks = ranks
        self.shown = optimizer
        self.stepping = optimizer
        self.sharded: ShardedOptimizer | None = None
        self._sharded_parts: ShardedParts | None = None
        if isinstance(optimizer, ShardedOptimizer):
            optimizer._sync_hyperparameters()
            self.sharded = optimizer
            self._sharded_parts = ShardedParts(optimizer)
            self.stepping = optimizer.optim
        elif isinstance(optimizer, TorchZero):
            ranks.refuse(
                "got torch's ZeroRedundancyOptimizer, which tells nobody what its ranks own",
                "Use trireme.ZeroRedundancyOptimizer.",
            )
        names = {id(param.tensor): param for param in model}
        self.groups: list[list[Stepped]] = []
        for number, group in enumerate(optimizer.param_groups):
            self.groups.append([])
            for index, param in enumerate(group["params"]):
                if id(param) not in names:
                    if not has_memory(param):
                        continue  # other ranks have it
                    ranks.refuse(
                        f"got an optimizer whose param_groups[{number}]['params'][{index}] of "
                        f"shape {tuple(param.shape)} is no parameter of the model",
                        "Pass the model that it was made for.",
                    )
                self.groups[-1].append(self._stepped(names[id(param)], param))

    def _stepped(self, named: NamedTensor, param: torch.Tensor) -> Stepped:
        if (parts := self._sharded_parts) is not None:
            owner = parts.first_owner(param)
            return Stepped(named.name, parts.shard_of(param), parts.part_of(param), owner)
        return Stepped(named.name, param, part_of(named, self.ranks), None)

    # saving

    def to_save(self) -> tuple[list[CheckpointTensor], str]:
        """This rank's part of the state, and the JSON text of the rest."""
        tensors: list[CheckpointTensor] = []
        states: dict[str, Any] = {}
        for stepped in (param for group in self.groups for param in group):
            state = self.stepping.state.get(stepped.target, {})
            kept: dict[str, Any] = {"tensors": [], "values": {}}
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors.append(self._tensor_to_save(stepped, key, value))
                    kept["tensors"].append(key)
                else:
                    what = f"optimizer state '{key}' of '{stepped.name}'"
                    kept["values"][key] = plain_json(value, what, self.ranks)
            if state:
                states[stepped.name] = kept
        groups = [
            {"params": [param.name for param in group], **self._group_values(shown)}
            for group, shown in zip(self.groups, self.shown.param_groups, strict=True)
        ]
        return tensors, json.dumps({"param_groups": groups, "state": states})

    def _group_values(self, group: dict[str, Any]) -> dict[str, Any]:
        values = {}
        for key, value in hyperparameters(group).items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, tuple):
                value = list(value)
            values[key] = plain_json(value, f"'{key}' of a parameter group", self.ranks)
        return values

    def _tensor_to_save(self, stepped: Stepped, key: str, value: torch.Tensor) -> CheckpointTensor:
        name = f"{stepped.name}.{key}"
        local = held_of(value)
        if local.shape == stepped.part.local_shape and (
            not isinstance(value, DTensor) or value.shape == stepped.part.shape
        ):
            return stepped.part.to_save(name, local, self.ranks)
        if local.dim() > 0 and not stepped.part.is_whole:
            self.ranks.refuse(
                f"got optimizer state '{key}' of '{stepped.name}' of shape {tuple(value.shape)}, "
                f"expected that of the parameter, {tuple(stepped.part.shape)}, or a scalar",
                "Save it under a strategy that keeps whole parameters.",
            )
        if stepped.owner is None:
            part = whole(local.shape, is_shared=stepped.part.is_shared)
            return part.to_save(name, local, self.ranks)
        assert self.sharded is not None
        own = local if stepped.owner == self.sharded.rank else None
        return CheckpointTensor(name, local.dtype, list(local.shape), own)

    # loading

    def names(self) -> list[set[str]]:
        """The parameters of each group."""
        return [{param.name for param in group} for group in self.groups]

    def to_load(self, source: CheckpointSource, names: list[set[str]]) -> LoadedOptimizer:
        """Memory for this rank's part of a saved state: that of the present one, where it has.
        ``names`` are those of all ranks' parameters, by group.

        Raises:
            ValueError: it is that of other parameters.
        """
        text = source.text(FILE)
        if not text:
            self.ranks.refuse(
                "got a checkpoint without an optimizer", "Leave the optimizer out, or save one."
            )
        saved = json.loads(text)
        self._check_groups(saved["param_groups"], names)
        known = source.tensors(KIND)
        loaded = LoadedOptimizer(self, saved["param_groups"])
        for stepped in (param for group in self.groups for param in group):
            entry = saved["state"].get(stepped.name)
            if entry is None or (stepped.owner is not None and stepped.target.numel() == 0):
                continue
            state = dict(entry["values"])
            for key in entry["tensors"]:
                name = f"{stepped.name}.{key}"
                if name not in known:
                    got = f"got a checkpoint without '{name}'"
                    self.ranks.refuse(got, "Restore its files, or load another checkpoint.")
                state[key], read = self._memory_for(stepped, key, known[name])
                loaded.tensors.append(read)
            loaded.states[id(stepped.target)] = state
        return loaded

    def _memory_for(
        self, stepped: Stepped, key: str, saved: CheckpointTensor
    ) -> tuple[torch.Tensor, CheckpointTensor]:
        target, shape = stepped.target, torch.Size(saved.sizes)
        if shape != stepped.part.shape:
            if shape and not stepped.part.is_whole:
                self.ranks.refuse(
                    f"got optimizer state '{saved.name}' of shape {tuple(shape)}, expected "
                    f"{tuple(stepped.part.shape)}",
                    "Load it under a strategy that keeps whole parameters.",
                )
            values = torch.empty(shape, dtype=saved.dtype)
            return values, whole(shape).to_load(saved.name, values)
        dtype = loaded_state_dtype(self.stepping, target, key, saved.dtype)
        if (present := self._present(stepped, key, dtype)) is not None:
            return present, stepped.part.to_load(saved.name, held_of(present), saved.dtype)
        if _follows(target, key):
            # Not from_local(), which would move what is offloaded to the mesh's device.
            values = torch.empty_like(target.detach(), dtype=dtype)
        else:
            values = torch.empty(stepped.part.local_shape, dtype=dtype, device=target.device)
        return values, stepped.part.to_load(saved.name, held_of(values), saved.dtype)

    def _present(self, stepped: Stepped, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns what the optimizer has already, if it can be read into."""
        target, value = stepped.target, self.stepping.state.get(stepped.target, {}).get(key)
        if not isinstance(value, torch.Tensor):
            return None
        if _follows(target, key):
            assert isinstance(target, DTensor)
            if not isinstance(value, DTensor) or _layout(value) != _layout(target):
                return None
        elif isinstance(value, DTensor):
            return None
        held = held_of(value)
        expected = (stepped.part.local_shape, dtype, target.device)
        return value if (held.shape, held.dtype, held.device) == expected else None

    def _check_groups(self, saved: list[dict[str, Any]], names: list[set[str]]) -> None:
        next_step = "Make the optimizer with the groups of the one that was saved."
        for number, mine in enumerate(names):
            theirs = set(saved[number]["params"]) if number < len(saved) else set()
            for name in sorted(mine ^ theirs):
                has = "without" if name in mine else "with"
                self.ranks.refuse(
                    f"got an optimizer {has} '{name}' in group {number} of the checkpoint, "
                    "expected the groups of this one",
                    next_step,
                )
        if len(saved) != len(self.groups):
            got = f"got {len(saved)} parameter groups, expected {len(self.groups)}"
            self.ranks.refuse(got, next_step)


class LoadedOptimizer:
    """A state whose tensors are read, then put in place."""

    def __init__(self, parts: OptimizerParts, groups: list[dict[str, Any]]) -> None:
        self._parts = parts
        self._groups = groups
        self.states: dict[int, dict[str, Any]] = {}
        self.tensors: list[CheckpointTensor] = []

    def put_into_optimizer(self) -> None:
        """Calls its own ``load_state_dict``, which knows what its class wants."""
        shown, stepping = self._parts.shown, self._parts.stepping
        updates = [
            {key: _as_before(current.get(key), value) for key, value in saved.items()}
            for current, saved in zip(shown.param_groups, self._groups, strict=True)
        ]
        for update in updates:
            del update["params"]
        if (sharded := self._parts.sharded) is not None:
            for group, update in zip(sharded.param_groups, updates, strict=True):
                group.update(update)
            sharded._sync_hyperparameters()
        description = stepping.state_dict()["param_groups"]
        states: dict[int, dict[str, Any]] = {}
        for group, described, update in zip(
            stepping.param_groups, description, updates, strict=True
        ):
            described.update(update)
            for param, number in zip(group["params"], described["params"], strict=True):
                if id(param) in self.states:
                    states[number] = self.states[id(param)]
        stepping.load_state_dict({"state": states, "param_groups": description})


def _follows(target: torch.Tensor, key: str) -> bool:
    """Whether a state that is shaped as its parameter is a DTensor. Torch, too, tells by the name
    what belongs to no element, where a parameter is a scalar."""
    return isinstance(target, DTensor) and key != "step"


def _layout(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements


def _as_before(current: Any, value: Any) -> Any:
    """What JSON has made a list of, or a number, is what it was."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value


def plain_json(value: Any, what: str, ranks: Ranks) -> Any:
    """``value``, of which JSON says the same.

    Raises:
        TypeError: JSON says something else.
    """
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError, RecursionError):
        pass
    ranks.refuse(
        f"got {what} as {type(value).__name__}: {_shown(value)}, which JSON cannot say",
        "Keep it in tensors, or in numbers, texts, lists and dicts with texts as keys.",
        kind=TypeError,
    )


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except (ValueError, RecursionError):  # an integer of very many digits; nested very deep
        return "..."
