"""How ranks that have run out of inputs step as those do that have not."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.optim import Optimizer

from trireme._core.errors import Area

_AREA = Area("join")
_NEVER = -math.inf


def check_joined_batch_norms(
    module: nn.Module, config: _JoinConfig, area: Area, group: dist.ProcessGroup
) -> None:
    """Refuses layers in which all ranks' statistics meet, where some ranks have no inputs."""
    if config.throw_on_early_termination:  # nobody goes on without them
        return
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training:
            area.refuse(
                f"got SyncBatchNorm at '{name}' under join(), expected layers that need no rank "
                "without inputs",
                "Give such ranks empty batches in place of join(), or pass "
                "throw_on_early_termination=True.",
                group,
            )


class Clip(NamedTuple):
    """The options of a ``clip_grad_norm_()``."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool


class JoinedSteps:
    """Tells ranks that have run out of inputs in a torch ``Join`` how the others step ``optimizer``
    and clip its gradients; ``Join`` itself tells them nothing.

    Each call is collective, and costs a small all-reduce. With ``shares_gradients`` a step costs a
    broadcast of the gradients, once a rank has run out. ``clip`` is ``clip_grad_norm_``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        clip: Callable[..., object],
        shares_gradients: bool = False,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)  # it may hold this
        self.group = group
        self._device = device
        self._clip = clip
        self._shares_gradients = shares_gradients
        self.has_run_out = False
        """Whether this rank has no inputs any more."""
        _living.add(self)

    @staticmethod
    def exist() -> bool:
        """Whether a join may be running: who clips outside of all asks no parameter."""
        return bool(_living)

    def is_of(self, optimizer: Optimizer) -> bool:
        return self._optimizer() is optimizer

    def parameters(self) -> list[torch.Tensor]:
        return [param for options in self._options() for param in options["params"]]

    def share_clip(self, clip: Clip) -> None:
        """Before ``clip_grad_norm_()`` of all parameters(), in their order."""
        self._tell(clip)

    def share_step(self) -> None:
        """Before a step: ranks without inputs get the numbers of the others' ``param_groups``,
        which a learning-rate schedule changes, and with ``shares_gradients`` their gradients, which
        may be clipped."""
        told = self._tell(None)
        while told.clip is not None:
            self._clip(self.parameters(), *told.clip)
            told = self._tell(None)
        if not told.any_has_run_out:
            return
        if self.has_run_out:
            for (options, name, index, _), number in zip(
                _numbers(self._options()), told.numbers, strict=True
            ):
                _set(options, name, index, number)
        if self._shares_gradients:
            self._share_gradients(told.root)

    def _options(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.param_groups

    def _tell(self, clip: Clip | None) -> _Told:
        """Returns what the ranks with inputs do; one without inputs says nothing."""
        clips = 0 if clip is None else 1
        of_clip = Clip(0, 0, False) if clip is None else clip
        options = [number for *_, number in _numbers(self._options())]
        said = [-self.group.rank(), clips, -clips, *of_clip, *options]
        said = [1, *[_NEVER] * len(said)] if self.has_run_out else [0, *said]
        told = torch.tensor(said, dtype=torch.float64).to(self._device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        any_has_run_out, root, clips, minus_clips, *numbers = told.tolist()
        if clips != -minus_clips:
            _AREA.refuse(
                "got clip_grad_norm_() on some ranks of a join and a step on others, expected one "
                "of them on all ranks that have inputs",
                "Clip on all ranks, or on none.",
                self.group,
                kind=RuntimeError,
            )
        max_norm, norm_type, error_if_nonfinite, *numbers = numbers
        clip = Clip(max_norm, norm_type, bool(error_if_nonfinite)) if clips else None
        return _Told(bool(any_has_run_out), -int(root), clip, numbers)

    @torch.no_grad()
    def _share_gradients(self, root: int) -> None:
        parameters = self.parameters()
        found = [
            parameter.grad is not None and parameter.grad.layout == torch.strided
            for parameter in parameters
        ]
        has_gradient = torch.tensor(found, dtype=torch.uint8, device=self._device)
        dist.broadcast(has_gradient, group=self.group, group_src=root)
        for parameter, is_there in zip(parameters, has_gradient.tolist(), strict=True):
            if not is_there:
                if self.has_run_out:
                    parameter.grad = None
                continue
            is_root = not self.has_run_out and self.group.rank() == root
            own = parameter.grad if is_root else None
            moved = (torch.empty_like(parameter) if own is None else own).contiguous()
            dist.broadcast(moved, group=self.group, group_src=root)
            if self.has_run_out:
                parameter.grad = moved


_living: weakref.WeakSet[JoinedSteps] = weakref.WeakSet()


class _Told(NamedTuple):
    any_has_run_out: bool
    root: int
    """One of the ranks that have inputs."""
    clip: Clip | None
    """What they do; None for a step."""
    numbers: list[float]
    """The options of their optimizer."""


def _numbers(
    param_groups: list[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], str, int | None, float]]:
    """Each number of the options: its dict, its name, its index in a tuple, its value."""
    for options in param_groups:
        for name, value in options.items():
            is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
            if is_tensor or isinstance(value, bool | int | float):
                yield options, name, None, float(value)
            elif isinstance(value, tuple):
                for index, item in enumerate(value):
                    if isinstance(item, bool | int | float):
                        yield options, name, index, float(item)


def _set(options: dict[str, Any], name: str, index: int | None, number: float) -> None:
    value = options[name]
    if isinstance(value, torch.Tensor):
        value.fill_(number)
    elif index is None:
        options[name] = type(value)(number)
    else:
        one = type(value[index])(number)
        options[name] = (*value[:index], one, *value[index + 1 :])
