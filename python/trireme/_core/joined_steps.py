"""How ranks that have run out of inputs step as those do that have not."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.optim import Optimizer

from trireme._C import JoinCall, JoinMeeting
from trireme._core.errors import Area
from trireme._core.group_communicator import communicator_of

_AREA = Area("join")
_STEP, _CLIP = 1, 2  # of a JoinCall


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

    Each call is collective, and costs a small all-reduce. Once a rank has run out, a step costs two
    small gathers more, and with ``shares_gradients`` a broadcast of the gradients. ``clip`` is
    ``clip_grad_norm_``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        *,
        clip: Callable[..., object],
        shares_gradients: bool = False,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)  # it may hold this
        self.group = group
        self._communicator = communicator_of(group)  # lives as long as this
        self._meeting = JoinMeeting(self._communicator)
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
        self._meet(JoinCall(_CLIP, [*map(float, clip), 0]))

    def share_step(self) -> None:
        """Before a step: ranks without inputs get the numbers of the others' ``param_groups``,
        which a learning-rate schedule changes, and with ``shares_gradients`` their gradients, which
        may be clipped."""
        while (call := self._meet(JoinCall(_STEP))).what == _CLIP:
            max_norm, norm_type, error_if_nonfinite, _ = call.numbers
            self._clip(self.parameters(), max_norm, norm_type, bool(error_if_nonfinite))
        if not self._meeting.any_has_run_out:
            return
        self._share_options()
        if self._shares_gradients:
            self._meeting.share_gradients(self.parameters())

    def _options(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.param_groups

    def _meet(self, own: JoinCall) -> JoinCall:
        """Returns what the ranks with inputs do; one without inputs says nothing."""
        self._meeting.meet(None if self.has_run_out else own)
        if len({call.what for call in self._meeting.calls if call is not None}) > 1:
            _AREA.refuse(
                "got clip_grad_norm_() on some ranks of a join and a step on others, expected one "
                "of them on all ranks that have inputs",
                "Clip on all ranks, or on none.",
                self.group,
                kind=RuntimeError,
            )
        return self._meeting.call

    def _share_options(self) -> None:
        own = json.dumps([number for *_, number in _numbers(self._options())])
        told = json.loads(self._meeting.text_of_root(own))
        if self.has_run_out:
            for (options, name, index, _), number in zip(
                _numbers(self._options()), told, strict=True
            ):
                _set(options, name, index, number)


_living: weakref.WeakSet[JoinedSteps] = weakref.WeakSet()


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
