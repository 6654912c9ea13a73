"""The step that sums up gradients while it uses them."""

from __future__ import annotations

from trireme._C import FusedAdamGroup, Zero
from trireme._core.fused_optimizer import adam_options, init_adam
from trireme._core.owners import ShardedOptimizer


def fused_adam_step(optimizer: ShardedOptimizer, number: int, core: Zero) -> None:
    """Steps what the last backward has left to be summed up; nothing if it has left nothing."""
    summed = core.summed()
    if not summed:
        return
    groups = []
    for shown, local in zip(optimizer.param_groups, optimizer.optim.param_groups, strict=True):
        group = FusedAdamGroup()
        indices, states = [], []
        for parameter in shown["params"]:
            place, index = optimizer._places[parameter]
            shard = optimizer._shards[parameter]
            if place != number or not summed[index] or shard.numel() == 0:
                continue
            state = optimizer.optim.state[shard]
            if not state:
                init_adam(shard, state, local)
            indices.append(index)
            states.append(state)
        group.parameters = indices
        group.exp_avgs = [state["exp_avg"] for state in states]
        group.exp_avg_sqs = [state["exp_avg_sq"] for state in states]
        if local["amsgrad"]:
            group.max_exp_avg_sqs = [state["max_exp_avg_sq"] for state in states]
        group.steps = [state["step"] for state in states]
        group.options = adam_options(local)
        groups.append(group)
    core.fused_adam_step(groups)
