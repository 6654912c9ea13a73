"""Checks of what a caller gives to ZeroRedundancyOptimizer, each with its message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import optim
from torch.optim import Optimizer

from trireme._C import ShardPlacement
from trireme._core.fused_optimizer import FusedAdam
from trireme._core.owners import averaging_module_of
from trireme._zero import refuse

# Each element is treated by itself, so that a slice of a parameter is as good as all of it.
_ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    }
)


def check_stage(stage: Any, overlap_with_ddp: bool, group: dist.ProcessGroup) -> None:
    """Refuses what is no stage of this class."""
    if stage not in (1, 2) or isinstance(stage, bool):
        refuse(
            f"got stage {stage!r}, expected 1 or 2",
            "Stage 3 shards the parameters, too: use fully_shard.",
            group,
        )
    if overlap_with_ddp:
        refuse(
            "got overlap_with_ddp=True, which has nothing to overlap here", "Leave it out.", group
        )


def check_optimizer_class(optimizer_class: Any, stage: int, group: dist.ProcessGroup) -> None:
    """Refuses what is no optimizer, or cannot work on a part of the parameters."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        refuse(
            f"got {optimizer_class!r} as optimizer_class, expected a subclass of "
            "torch.optim.Optimizer",
            "Pass the class itself, e.g. torch.optim.AdamW.",
            group,
            kind=TypeError,
        )
    if issubclass(optimizer_class, optim.LBFGS):
        refuse(
            "got LBFGS, which needs all parameters at once and calls its closure while it writes "
            "them",
            "Use it without sharding, under DistributedDataParallel.",
            group,
        )
    if issubclass(optimizer_class, optim.SparseAdam) and stage == 2:
        refuse(
            "got SparseAdam under stage 2, where averages are dense",
            "Use stage 1, or Adam and sparse=False.",
            group,
        )


def check_fused_step(
    fused_step: bool, stage: int, optimizer_class: type[Optimizer], group: dist.ProcessGroup
) -> None:
    """The fused step is that of our own Adam, over gradients that were reduced for stage 2."""
    if not fused_step:
        return
    if stage != 2 or not issubclass(optimizer_class, FusedAdam):
        refuse(
            f"got fused_step=True for stage {stage} and {optimizer_class.__name__}, expected stage "
            "2 and trireme.optim.Adam or AdamW",
            "Change them, or leave fused_step out.",
            group,
        )


def as_param_groups(params: Any, group: dist.ProcessGroup) -> list[Any]:
    """``params`` as what Optimizer takes, gone through once."""
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        refuse(
            f"got {type(params).__name__} as params, expected parameters or groups of them",
            "Pass model.parameters().",
            group,
            kind=TypeError,
        )
    groups = list(params)
    if not groups:
        refuse("got no parameters, expected at least one", "Pass model.parameters().", group)
    kinds = {isinstance(group, dict) for group in groups}
    if len(kinds) > 1:
        got = "got parameters and groups of them in one list, expected either"
        refuse(got, "Put all parameters into groups.", group, kind=TypeError)
    for listed in groups:
        held = listed.get("params") if isinstance(listed, dict) else listed
        if held is None or (isinstance(listed, dict) and not _holds_any(listed)):
            refuse("got a parameter group without parameters", "Give it 'params'.", group)
    return groups


def _holds_any(group: dict[str, Any]) -> bool:
    if isinstance(group["params"], torch.Tensor):
        return True
    group["params"] = list(group["params"])
    return len(group["params"]) > 0


def names_of(
    groups: list[dict[str, Any]], first: int, found: dict[torch.Tensor, str]
) -> dict[torch.Tensor, str]:
    """Says what messages call the parameters of ``groups``, the first of which is number ``first``:
    the name that the caller gave, else the one that was ``found``, else its place."""
    names = {}
    for number, group in enumerate(groups, first):
        given = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            place = f"param_groups[{number}]['params'][{index}]"
            names[parameter] = found.get(parameter, place) if given is None else given[index]
    return names


def check_parameters(names: dict[torch.Tensor, str], group: dist.ProcessGroup) -> None:
    """Refuses parameters that have no shape or memory of their own yet, or no dense one."""
    for parameter, name in names.items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            got = f"got lazy parameter '{name}' without a shape, expected an initialised module"
            refuse(got, "Run one forward before.", group)
        if parameter.layout != torch.strided:
            got = f"got '{name}' of layout {parameter.layout}, expected a dense parameter"
            refuse(got, "Make it dense, or train it by an optimizer of its own.", group)
        if parameter.is_meta and all(other.is_meta for other in names):
            got = f"got '{name}' on the meta device, expected a parameter with memory"
            next_step = "Call module.to_empty(device=...) and initialise it before."
            refuse(got, next_step, group, kind=RuntimeError)


def check_averaged(names: dict[torch.Tensor, str], stage: int, group: dist.ProcessGroup) -> None:
    """Refuses parameters that a module averages in a way with which no step fits."""
    for parameter, name in names.items():
        module = averaging_module_of(parameter)
        if module is None:
            continue
        if stage == 2:
            refuse(
                f"got stage 2 for '{name}', which DistributedDataParallel averages already",
                "Use the plain module, or stage=1.",
                group,
            )
        if module.process_group != group:
            refuse(
                f"got '{name}', which DistributedDataParallel averages over another group",
                "Pass the same process_group to both.",
                group,
            )


def placement_for(
    optimizer_class: type[Optimizer], placement: str | None, group: dist.ProcessGroup
) -> ShardPlacement:
    """Slices where the optimizer treats elements alike, whole parameters otherwise."""
    if placement not in (None, "shards", "whole"):
        refuse(
            f"got placement {placement!r}, expected 'shards', 'whole' or None",
            "Leave it out.",
            group,
        )
    known = optimizer_class.__module__.startswith(("torch.optim", "trireme.optim"))
    elementwise = known and optimizer_class.__name__ in _ELEMENTWISE
    if placement == "shards" or (placement is None and elementwise):
        return ShardPlacement.DIM0
    return ShardPlacement.WHOLE
