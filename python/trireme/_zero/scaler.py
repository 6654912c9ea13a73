"""What a GradScaler knows when it calls ``step()``, and what it must be told."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from trireme._core.found_inf import on_any_rank
from trireme._core.owners import stages_of
from trireme._zero import refuse

if TYPE_CHECKING:
    from trireme._zero.optimizer import ZeroRedundancyOptimizer


@functools.cache
def _counted_writes() -> int:
    """Says how many writes autograd counts when a GradScaler unscales a gradient."""
    gradient = torch.ones(1)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], torch.zeros(1), torch.ones(1))
    return gradient._version


class ScalerCheck:
    """The inf check of one step. Each rank looks at its own shards; all take one decision.

    If the user has called ``unscale_``, that has written every gradient and looked for infs on
    this rank. Else both are done here, for the shards only; in a pipeline ranks of other stages are
    asked, too, as they are by ``unscale_``.
    """

    def __init__(self, scaler: GradScaler | None, optimizer: ZeroRedundancyOptimizer) -> None:
        self.found_inf = False
        self.writes: int | None = None
        self._inverse: torch.Tensor | None = None
        self._state = None
        if scaler is None or not scaler.is_enabled():
            return
        self._device = optimizer.join_device
        self._state = scaler._per_optimizer_states[id(optimizer)]
        if self._state["stage"] is OptState.UNSCALED:
            if any(core.summed() for core in optimizer._cores):
                refuse(
                    "got GradScaler.unscale_ under fused_step=True, expected no gradients to be "
                    "looked for before step()",
                    "Leave unscale_ out, or fused_step.",
                    optimizer.process_group,
                    kind=RuntimeError,
                )
            self.writes = _counted_writes()
            found = self._state["found_inf_per_device"].values()
            self.found_inf = any(bool(is_inf.item()) for is_inf in found)
            return
        scale = scaler._get_scale_async()
        assert scale is not None
        self._inverse = scale.double().reciprocal().float().to(self._device)
        self.found_inf = self._has_inf(optimizer)
        stages = stages_of(optimizer.param_groups[0]["params"][0])
        if stages is not None:
            self.found_inf = on_any_rank(self.found_inf, stages.norm_over_stages())

    def _has_inf(self, optimizer: ZeroRedundancyOptimizer) -> bool:
        gradients: list[torch.Tensor] = []
        for core, count in zip(optimizer._cores, optimizer._counts(), strict=True):
            own = core.own_gradients(list(range(count)))
            gradients += [gradient for gradient in own if gradient.numel() > 0]
        if not gradients:
            return False
        norms = torch._foreach_norm(gradients, float("inf"))
        return not bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())

    def tell(self, found_inf: bool) -> None:
        """Makes ``update()`` change the scale on all ranks alike."""
        if self._state is not None:
            told = torch.full((), float(found_inf), device=self._device)
            self._state["found_inf_per_device"] = {self._device: told}

    def unscale(self, shards: Iterable[torch.Tensor]) -> None:
        """Unscales the gradients that this rank steps with."""
        if self._inverse is None:
            return
        for shard in shards:
            if shard.grad is not None and shard.numel() > 0:
                shard.grad.mul_(self._inverse)
