"""How a rank that ran out of inputs keeps the others company under fully_shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig
from torch.optim import Optimizer

from trireme._core.clip_grad import clip_grad_norm_
from trireme._core.joined_steps import JoinedSteps, check_joined_batch_norms
from trireme._fsdp import AREA, refuse

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
        self.steps = JoinedSteps(optimizer, self.root.units[0].mesh.group, clip=clip_grad_norm_)
        self.root.joined = self.steps
        super().__init__()

    def main_hook(self) -> None:
        _check_batch_norms(self.root)
        core = self.root.core
        if core is None:
            return
        self.optimizer.zero_grad()  # with what this rank still has it has stepped
        core.begin_reading()
        core.shadow_step(self.root.units[0].group)
        self.steps.has_run_out = True
        try:
            self.optimizer.step()
        finally:
            self.steps.has_run_out = False
        self.optimizer.zero_grad()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.root.joined = None


def _check_batch_norms(root: FsdpRoot) -> None:
    module = root.units[0].modules[0]
    config = module._join_config  # the user's, if the class has one
    if isinstance(config, _JoinConfig):
        check_joined_batch_norms(module, config, AREA, root.units[0].mesh.group)


def in_join(root: FsdpRoot) -> JoinedSteps | None:
    """What tells ranks that have run out of inputs, if this one has not."""
    config = root.units[0].modules[0]._join_config  # the user's, if the class has one
    is_enabled = isinstance(config, _JoinConfig) and config.enable
    joined = root.joined
    return joined if is_enabled and joined is not None and not joined.has_run_out else None


def share_step(root: FsdpRoot, optimizer: Optimizer) -> None:
    """Before a step, and before its gate: ranks that have run out come to that after this only."""
    joined = root.joined
    if joined is None or not joined.is_of(optimizer):
        return
    if joined.has_run_out or in_join(root) is not None:
        joined.share_step()


def notify_of_forward(root: FsdpRoot) -> None:
    """Before the outermost forward of a rank that still has inputs."""
    module = root.units[0].modules[0]
    config = module._join_config  # the user's, if the class has one
    if not isinstance(config, _JoinConfig) or not config.enable or not torch.is_grad_enabled():
        return
    if torch._C._current_graph_task_id() != -1:  # computed again by a checkpoint
        return
    work = Join.notify_join_context(module)
    _check_batch_norms(root)
    if work is None or root.core is None:
        return
    divisor = root.units[0].mesh.world
    if root.divides_by_active_ranks:
        work.wait()
        divisor = int(work.get_future().value()[0].item())
    root.core.set_divisor(divisor)
