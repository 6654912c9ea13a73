"""Optimizers of torch's ``_apply_optimizer_in_backward``, under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def step_in_backward(parameters: Sequence[torch.Tensor]) -> Callable[[list[int]], None] | None:
    """Takes over the optimizers that hang on ``parameters``; None if there are none.

    torch's own hooks would step with this rank's gradient alone; they are removed. The result is
    to be called with the indices of parameters whose gradient has just become final: it steps
    their optimizers and drops the gradients.
    """
    if not any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        return None
    from torch.distributed.optim.apply_optimizer_in_backward import (
        param_to_optim_hook_handle_map as handles,
    )

    for parameter in parameters:
        for handle in handles.get(parameter, []):
            handle.remove()

    def step(delivered: list[int]) -> None:
        for index in delivered:
            parameter = parameters[index]
            optimizers = getattr(parameter, "_in_backward_optimizers", ())
            for optimizer in optimizers:
                optimizer.step()
            if optimizers:
                parameter.grad = None

    return step
