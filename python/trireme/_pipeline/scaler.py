"""Pipelines that know a GradScaler."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from trireme._C import Communicator
from trireme._core.loss_scale import LossScale, check_scaler
from trireme._core.owners import stages_of
from trireme._pipeline import AREA, refuse
from trireme._pipeline.stages import StageCalls


def refuse_what_leaves(calls: Iterable[StageCalls], group: dist.ProcessGroup | None) -> None:
    """Refuses stages under a scaler whose backward sends gradients away."""
    for call in calls:
        if call.sends_gradients:
            got = (
                f"got a GradScaler and stage {call.stage.number} ({call.stage}), whose "
                "backward sends gradients away before they are unscaled"
            )
            refuse(got, "Train without a scaler.", group, kind=NotImplementedError)


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
        check_scaler(scaler, AREA, has_one=self._loss_scale is not None)
        if scaler.is_enabled():
            ranks = self._communicator
            # A function that knows no more than the ranks: a scaler does not keep its pipeline.
            self.share_scale(LossScale(scaler, ranks, partial(_has_stages_over, ranks), AREA))

    def share_scale(self, scale: LossScale) -> None:
        """From now on gradients are multiplied by a scale that others may have, too."""
        self._loss_scale = scale


def _has_stages_over(ranks: Communicator, param: Tensor) -> bool:
    stages = stages_of(param)
    return stages is not None and stages.norm_over_stages() is ranks
