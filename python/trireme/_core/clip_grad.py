"""Clipping by norm, whoever holds the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _device_has_foreach_support

from trireme import _C
from trireme._core.errors import Area
from trireme._core.grad_parts import GradParts, in_shards
from trireme._core.joined_steps import Clip, JoinedSteps
from trireme._core.owners import StagedModule, optimizer_of, unit_of

_AREA = Area("grad_norm")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor] | StagedModule,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Replaces ``torch.nn.utils.clip_grad_norm_`` under every strategy.

    Scales the gradients of ``parameters`` in place so that their common norm is at most
    ``max_norm``; returns what it was, the same on all ranks. Gradients that are whole on every
    rank (DDP, ZeRO stage 1) are counted as they are; sharded ones (ZeRO stage 2,
    ``fully_shard``) take one all-reduce of one number per optimizer or mesh, and one more for
    those that tensor parallelism has cut as well. Of a ``Pipeline``, which may be given itself, all
    stages count, by one all-reduce of one number; give it itself where some rank has no parameters.
    DTensors that torch's ``fully_shard`` or tensor parallelism has made are torch's to clip, and
    come alone, unless they are a ``Pipeline``'s. Collective if any is sharded: every rank passes
    the same parameters. In a torch ``Join`` these are all of the optimizer that steps there, and
    ranks without inputs take part; that costs another all-reduce of a few numbers.

    Args:
        norm_type: any number or infinity, as in torch; but for 0, where gradients are sharded.
        error_if_nonfinite: raise (on all ranks) if the norm is inf or NaN.
        foreach: chooses among torch's implementations, and changes nothing here.

    Raises:
        TypeError: a module that is no ``Pipeline``.
        ValueError: a ``norm_type`` of NaN, or of 0 for sharded gradients; parameters that torch has
            sharded beside such that Trireme has; in a ``Join`` sharded parameters of a part of an
            optimizer, or of several.
        RuntimeError: the norm is not finite; a sharded gradient was changed since backward;
            ``foreach=True`` on a device for which torch has no such implementation.
    """
    stages = None
    if isinstance(parameters, StagedModule):
        stages = parameters.norm_over_stages()  # this rank may have no parameter
        parameters = parameters.parameters()
    elif isinstance(parameters, nn.Module):
        got = f"got a {type(parameters).__name__}, expected parameters or a trireme.Pipeline"
        _AREA.refuse(got, "Pass its parameters().", kind=TypeError)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    parameters = _shared_in_join(parameters, Clip(max_norm, norm_type, error_if_nonfinite))
    found = GradParts(stages)
    for parameter in parameters:
        if foreach and parameter.grad is not None and not in_shards(parameter):
            _expect_foreach_on(parameter.grad.device)
        found.add(parameter)
    if found.cut_by_others:
        if found.are_sharded:
            _AREA.refuse(
                f"got {len(found.cut_by_others)} parameters that torch has sharded beside such "
                "that Trireme has, expected one kind",
                "Shard all of them with trireme.fully_shard.",
            )
        clip = torch.nn.utils.clip_grad_norm_
        norm: Any = clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    for gradients, own in found.cut_in_stages():
        own.append(_norm_by_torch(gradients, norm_type))
    held = found.parts()
    return _C.clip_grad_norm_(
        held,
        max_norm=float(max_norm),
        norm_type=float(norm_type),
        error_if_nonfinite=error_if_nonfinite,
    )


def _shared_in_join(parameters: list[torch.Tensor], clip: Clip) -> list[torch.Tensor]:
    """Tells ranks that have run out of inputs. Returns the parameters in the order of theirs."""
    if not JoinedSteps.exist():
        return parameters
    found = {id(joined): joined for it in parameters if (joined := _in_join(it)) is not None}
    if not found:
        return parameters
    joined, *others = found.values()
    every = joined.parameters()
    if others or {*map(id, filter(_counts, parameters))} != {*map(id, filter(_counts, every))}:
        _AREA.refuse(
            "got other parameters than those of one optimizer in a join, whose ranks without "
            "inputs clip all of that optimizer's",
            "Pass all parameters of the optimizer that steps in the join.",
            joined.group,
        )
    joined.share_clip(clip)
    return every


def _in_join(parameter: torch.Tensor) -> JoinedSteps | None:
    optimizer, unit = optimizer_of(parameter), unit_of(parameter)
    if optimizer is not None and optimizer.stage == 2:
        return optimizer._in_join()
    return None if unit is None else unit.in_join()


def _counts(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def _expect_foreach_on(device: torch.device) -> None:
    if not _device_has_foreach_support(device):
        got = f"got foreach=True for gradients on {device.type}, for which torch has none"
        _AREA.refuse(got, "Leave foreach out.", kind=RuntimeError)


def _norm_by_torch(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of DTensors of one mesh: what counts in their place. Collective over the mesh."""
    norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
    return norm.full_tensor().reshape(1)
