"""How a rank that ran out of inputs keeps the others company in sharded steps."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import Join, JoinHook

from trireme._core.clip_grad import clip_grad_norm_
from trireme._core.joined_steps import JoinedSteps

if TYPE_CHECKING:
    from trireme._zero.optimizer import ZeroRedundancyOptimizer


class ZeroJoinHook(JoinHook):
    """Mirrors the collectives of a backward (stage 2) and of a step; its shards are stepped."""

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, divide_by_initial_world_size: bool
    ) -> None:
        self.optimizer = optimizer
        self.steps = optimizer._joined = JoinedSteps(
            optimizer,
            optimizer.process_group,
            clip=clip_grad_norm_,
            shares_gradients=optimizer.stage == 1,
        )
        if optimizer.stage == 2:
            held = weakref.ref(optimizer)  # the core must not keep alive who keeps it

            def notify() -> None:
                if (alive := held()) is not None:
                    _notify(alive, divide_by_initial_world_size)

            optimizer._zero_cores.set_armed_callback(notify)
        super().__init__()

    def main_hook(self) -> None:
        optimizer = self.optimizer
        if optimizer.stage == 2:
            optimizer.zero_grad()  # with what this rank still has it has stepped
            optimizer._zero_cores.shadow_backward()
        joining = optimizer._join_config
        optimizer._join_config = joining.construct_disabled_join_config()  # nobody to be told
        self.steps.has_run_out = True
        try:
            optimizer.step()
        finally:
            self.steps.has_run_out = False
            optimizer._join_config = joining
        optimizer.zero_grad()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.optimizer._joined = None


def _notify(optimizer: ZeroRedundancyOptimizer, divide_by_initial_world_size: bool) -> None:
    """Before the first collective of a backward; counts the active ranks if they divide."""
    divisor = optimizer.world_size
    work = Join.notify_join_context(optimizer)
    if work is not None and not divide_by_initial_world_size:
        work.wait()
        divisor = int(work.get_future().value()[0].item())
    optimizer._zero_cores.set_divisor(divisor)
