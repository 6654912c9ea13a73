"""How a rank that ran out of inputs keeps the others company."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

from trireme._core.joined_steps import check_joined_batch_norms
from trireme._core.owners import optimizer_of
from trireme._ddp import AREA

if TYPE_CHECKING:
    from trireme._ddp.module import DistributedDataParallel


class DdpJoinHook(JoinHook):
    """Mirrors the collectives of a forward and a backward on a rank without inputs."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        super().__init__()

    def main_hook(self) -> None:
        ddp = self.ddp
        check_joined_batch_norms(ddp.module, ddp._join_config, AREA, ddp.process_group)
        if ddp._check_sync_bufs_pre_fwd():
            root = ddp._find_common_rank(ddp._distributed_rank, False)
            ddp._core.sync_buffers(ddp._current_buffers(), root)
        synchronizes = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = synchronizes
        if synchronizes:
            # A rank that owns shards of the optimizer's state steps on what the others average,
            # and on nothing that it still has of a parameter that they no longer use.
            owners = (optimizer_of(parameter) for parameter in ddp._reduced_parameters)
            sharding = {owner for owner in owners if owner is not None}
            for optimizer in sharding:
                optimizer.zero_grad()
            ddp._core.shadow_backward(deliver=bool(sharding))

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp = self.ddp
        root = ddp._find_common_rank(ddp._distributed_rank, is_last_joiner)
        ddp._core.sync_module(ddp._current_buffers() if ddp.forward_sync_buffers else [], root)
