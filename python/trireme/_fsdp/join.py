"""How a rank that ran out of inputs keeps the others company under fully_shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig
from torch.optim import Optimizer

from trireme._core.joined_steps import share_step
from trireme._fsdp import refuse

if TYPE_CHECKING:
    from trireme._fsdp.module import FSDPModule
    from trireme._fsdp.root import FsdpRoot


class FsdpJoinHook(JoinHook):
    """Takes part in forwards and backwards with zeros, and steps this rank's shards."""

    def __init__(
        self, module: FSDPModule, optimizer: Optimizer, divide_by_initial_world_size: bool
    ) -> None:
        self.root = module._trireme_unit.own_root()
        if len(self.root.meshes) > 1:
            refuse(
                f"got Join of a model with units on {len(self.root.meshes)} meshes",
                "Give all ranks as many inputs: which of them are active differs between meshes.",
            )
        self.root.divides_by_active_ranks = not divide_by_initial_world_size
        self.optimizer = optimizer
        self.has_run_out = False
        self.before_step = optimizer.register_step_pre_hook(self._share_step)
        super().__init__()

    def main_hook(self) -> None:
        core = self.root.core
        if core is None:
            return
        self.optimizer.zero_grad()  # with what this rank still has it has stepped
        core.begin_reading()
        core.shadow_step(self.root.units[0].group)
        self.has_run_out = True
        try:
            self.optimizer.step()
        finally:
            self.has_run_out = False
        self.optimizer.zero_grad()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.before_step.remove()

    def _share_step(self, *_: object) -> None:
        config = self.root.units[0].modules[0]._join_config
        if self.has_run_out or (isinstance(config, _JoinConfig) and config.enable):
            mesh = self.root.units[0].mesh
            share_step(
                self.optimizer,
                mesh.group,
                mesh.device,
                has_inputs=not self.has_run_out,
                gradients=False,
            )


def notify_of_forward(root: FsdpRoot) -> None:
    """Before the outermost forward of a rank that still has inputs."""
    module = root.units[0].modules[0]
    config = module._join_config  # the user's, if the class has one
    if not isinstance(config, _JoinConfig) or not config.enable or not torch.is_grad_enabled():
        return
    if torch._C._current_graph_task_id() != -1:  # computed again by a checkpoint
        return
    work = Join.notify_join_context(module)
    if work is None or root.core is None:
        return
    divisor = root.units[0].mesh.world
    if root.divides_by_active_ranks:
        work.wait()
        divisor = int(work.get_future().value()[0].item())
    root.core.set_divisor(divisor)
