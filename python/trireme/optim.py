"""Adam, AdamW and SGD: torch's classes, stepped by Trireme's C++ core in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from trireme import _C
from trireme._core.fused_optimizer import (
    FusedAdam,
    FusedOptimizer,
    Group,
    with_grad,
    zeros_like,
)


class Adam(FusedAdam, torch.optim.Adam):
    """``torch.optim.Adam``, fused; see :class:`AdamW`."""


class AdamW(FusedAdam, torch.optim.AdamW):
    """``torch.optim.AdamW``, fused: a subclass with the same arguments and ``state_dict``.

    One call into C++ per group and step makes one pass over memory, for any devices and dtypes of
    the group together. fp32 and fp64 results have the bits of torch's ``fused=True`` on the CPU,
    wherever its loops fuse multiply and add (x86 with AVX2). What differs:

    * bf16 and fp16 parameters have fp32 states, are computed with in fp32 and rounded once; torch
      rounds the states, too. A ``state_dict`` of either class loads into the other.
    * Gradients may be fp32 whatever the parameters are; complex ones are pairs of reals.
    * Memory that is not contiguous is stepped right. DTensors are stepped in their local memory.
    * ``foreach`` and ``fused`` only choose among torch's implementations and change nothing here. A
      learning rate that is a tensor on a GPU is waited for in every step.

    ``torch.amp.GradScaler`` works as with torch's fused optimizers: gradients are unscaled on their
    way into the step, which is skipped if one is infinite.

    Raises:
        ValueError: ``capturable=True`` or ``differentiable=True``; what torch's class refuses.
        RuntimeError: (from ``step``) a sparse gradient, as torch's Adam.
        TypeError: (from ``step``) a dtype other than fp32, fp64, fp16, bf16.
    """


class SGD(FusedOptimizer, torch.optim.SGD):
    """``torch.optim.SGD``, fused; see :class:`AdamW`. Sparse gradients are refused."""

    def _step_group(self, group: Group) -> None:
        params, grads = with_grad(group)
        options = _sgd_options(group)
        if options.momentum == 0:
            self._call(params, grads, [], options)
            return
        states = [self.state[param] for param in params]
        buffers = [state.get("momentum_buffer") for state in states]
        fresh = [i for i, buffer in enumerate(buffers) if buffer is None]
        if fresh:
            self._first_step([params[i] for i in fresh], [grads[i] for i in fresh], options)
            later = [i for i, buffer in enumerate(buffers) if buffer is not None]
            params, grads, buffers = (
                [list_[i] for i in later] for list_ in (params, grads, buffers)
            )
        self._call(params, grads, buffers, options)

    def _first_step(
        self, params: list[Tensor], grads: list[Tensor], options: _C.SgdStepOptions
    ) -> None:
        buffers = [zeros_like(param) for param in params]
        options.first_step = True
        self._call(params, grads, buffers, options)
        options.first_step = False
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return  # nothing was done: the first step is still to come
        for param, buffer in zip(params, buffers, strict=True):
            self.state[param]["momentum_buffer"] = buffer

    def _call(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        momentum_buffers: list[Tensor],
        options: _C.SgdStepOptions,
    ) -> None:
        if params:
            _C.sgd_step(
                params=params,
                grads=grads,
                momentum_buffers=momentum_buffers,
                options=options,
                **self._scaling(),
            )


def _sgd_options(group: Group) -> _C.SgdStepOptions:
    options = _C.SgdStepOptions()
    options.lr = float(group["lr"])
    options.momentum = group["momentum"]
    options.dampening = group["dampening"]
    options.weight_decay = float(group["weight_decay"])
    options.nesterov = group["nesterov"]
    options.maximize = group["maximize"]
    return options
