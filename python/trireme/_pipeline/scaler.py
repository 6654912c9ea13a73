"""One GradScaler on each rank of a pipeline: all scale alike, and take one decision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from trireme._C import Communicator
from trireme._core.found_inf import on_any_rank
from trireme._core.owners import stages_of
from trireme._pipeline import refuse
from trireme._pipeline.stages import StageCalls


class LossScale:
    """Makes a scaler that of a pipeline. Its ``unscale_``, and a ``step`` without that, ask the
    scalers of other ranks whether they have found an inf."""

    def __init__(self, scaler: GradScaler, communicator: Communicator) -> None:
        self._communicator = communicator
        self._value = scaler.get_scale
        scaler.scale(torch.zeros((), device=communicator.device))  # it has a scale from then on
        self._unscale = scaler._unscale_grads_
        theirs: Any = scaler
        theirs._unscale_grads_ = self._unscale_on_all
        theirs.scale = self._refuse_to_scale

    def value(self) -> float:
        """Returns the scale. On an accelerator it waits for that."""
        return float(self._value())

    def refuse_what_leaves(
        self, calls: Iterable[StageCalls], group: dist.ProcessGroup | None
    ) -> None:
        """Refuses stages whose backward sends gradients away."""
        for call in calls:
            if call.sends_gradients:
                got = (
                    f"got a GradScaler and stage {call.stage.number} ({call.stage}), whose "
                    "backward sends gradients away before they are unscaled"
                )
                refuse(got, "Train without a scaler.", group, kind=NotImplementedError)

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

    def _is_own(self, param: Tensor) -> bool:
        stages = stages_of(param)
        return stages is not None and stages.norm_over_stages() is self._communicator

    def _refuse_to_scale(self, outputs: object) -> NoReturn:
        got = "got a call of scale() of a GradScaler whose scale the pipeline applies itself"
        refuse(got, "Leave it out of loss=.", kind=RuntimeError)


class ScalesLosses:
    """The part of a pipeline that knows a GradScaler."""

    _communicator: Communicator
    _loss_scale: LossScale | None = None

    def scale_losses(self, scaler: GradScaler) -> None:
        """From now on gradients of ``step()`` are multiplied by the scale of ``scaler``.

        Each rank passes one of its own, with the same settings, and uses it as with any model::

            scaler = torch.amp.GradScaler("cpu")
            pipe.scale_losses(scaler)
            ...
            loss = pipe.step(x, target=y)  # without the scale
            scaler.unscale_(optimizer)
            trireme.clip_grad_norm_(pipe, 1.0)
            scaler.step(optimizer)
            scaler.update()

        An inf on one rank makes all ranks skip the step, and lower the scale. ``unscale_`` is
        collective, and so is a ``scaler.step`` without it: one gather of a number. So a rank
        without parameters calls it, too, with an optimizer of an empty group, as in
        ``SGD([{"params": []}])``. ``scaler.scale`` is the pipeline's from then on, and refuses
        other calls. A scaler that is not enabled changes nothing.

        Raises:
            TypeError: it is no ``torch.amp.GradScaler``.
            ValueError: there is one already; it is that of another pipeline. Scales that differ
                between ranks are found by the next ``step()``.
        """
        if not isinstance(scaler, GradScaler):
            got = f"got {type(scaler).__name__} as scaler, expected a torch.amp.GradScaler"
            refuse(got, "Make one on each rank.", kind=TypeError)
        if self._loss_scale is not None:
            refuse("got a second GradScaler for a pipeline", "Use the first one.")
        if isinstance(getattr(scaler.scale, "__self__", None), LossScale):
            refuse("got a GradScaler that another pipeline has", "Make one for each.")
        if scaler.is_enabled():
            self._loss_scale = LossScale(scaler, self._communicator)
