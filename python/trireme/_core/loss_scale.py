"""One GradScaler on each of several ranks that have other layers: all scale alike, and take one
decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from trireme._C import Communicator
from trireme._core.errors import Area
from trireme._core.found_inf import on_any_rank


class LossScale:
    """The scale of a scaler whose ``unscale_``, and whose ``step`` without that, ask the scalers of
    other ranks whether they have found an inf.

    They ask for an optimizer with parameters of which ``is_own`` is true, and for one without any.
    """

    def __init__(
        self,
        scaler: GradScaler,
        communicator: Communicator,
        is_own: Callable[[Tensor], bool],
        area: Area,
    ) -> None:
        self._communicator = communicator
        self._is_own = is_own
        self._area = area
        self._value = scaler.get_scale
        scaler.scale(torch.zeros((), device=communicator.device))  # it has a scale from then on
        self._unscale = scaler._unscale_grads_
        theirs: Any = scaler
        theirs._unscale_grads_ = self._unscale_on_all
        theirs.scale = self._refuse_to_scale

    def value(self) -> float:
        """Returns the scale. On an accelerator it waits for that."""
        return float(self._value())

    def _unscale_on_all(
        self, optimizer: torch.optim.Optimizer, inverse: Tensor, found_inf: Tensor, *rest: Any
    ) -> dict[torch.device, Tensor]:
        found = self._unscale(optimizer, inverse, found_inf, *rest)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if params and not any(map(self._is_own, params)):
            return found
        own = any(bool(is_inf.item()) for is_inf in found.values())
        on_any = on_any_rank(own, self._communicator)
        told = torch.full((), float(on_any), device=found_inf.device)
        return {found_inf.device: told}

    def _refuse_to_scale(self, outputs: object) -> NoReturn:
        got = "got a call of scale() of a GradScaler whose scale the pipeline applies itself"
        self._area.refuse(got, "Leave it out of loss=.", kind=RuntimeError)


def check_scaler(
    scaler: object, area: Area, group: dist.ProcessGroup | None = None, *, has_one: bool
) -> None:
    """Raises TypeError or ValueError for what cannot scale the losses of a pipeline."""
    if not isinstance(scaler, GradScaler):
        got = f"got {type(scaler).__name__} as scaler, expected a torch.amp.GradScaler"
        area.refuse(got, "Make one on each rank.", group, kind=TypeError)
    if has_one:
        area.refuse("got a second GradScaler for a pipeline", "Use the first one.", group)
    if isinstance(getattr(scaler.scale, "__self__", None), LossScale):
        area.refuse("got a GradScaler that another pipeline has", "Make one for each.", group)
