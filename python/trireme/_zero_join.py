"""How a rank that ran out of inputs keeps the others company in sharded steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from trireme.zero import ZeroRedundancyOptimizer


class ZeroJoinHook(JoinHook):
    """Mirrors the collectives of a backward (stage 2) and of a step; its shards are stepped."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = optimizer
        super().__init__()

    def main_hook(self) -> None:
        if self.optimizer.stage == 2:
            for core in self.optimizer._cores:
                core.shadow_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
