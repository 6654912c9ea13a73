"""torch's ``_MixedPrecision`` for DDP, without streams and on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _cast_forward_inputs


class MixedPrecisionForward:
    """Calls a module with its parameters cast for the length of one forward.

    The casts are part of the autograd graph: gradients arrive at the full-precision parameters in
    full precision, so the optimizer, clipping and checkpoints see nothing of it. Parameters are
    cast once per forward, tied ones once together. Extra memory: the cast parameters while the
    graph lives.
    """

    def __init__(self, policy: Any, module: nn.Module, ignored: set[str]) -> None:
        self.param_dtype: torch.dtype | None = policy.param_dtype
        # Gradients travel in the parameters' dtype unless told otherwise, as in torch.
        self.reduce_dtype: torch.dtype | None = policy.reduce_dtype or policy.param_dtype
        self.module = module
        self.ignored = ignored
        if policy.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(policy.buffer_dtype)

    @staticmethod
    def make(policy: Any, module: nn.Module, ignored: set[str]) -> MixedPrecisionForward | None:
        return None if policy is None else MixedPrecisionForward(policy, module, ignored)

    def cast_inputs(self, inputs: Any, kwargs: Any) -> Any:
        if self.param_dtype is None:
            return inputs, kwargs
        return _cast_forward_inputs(self.param_dtype, *inputs, **kwargs)

    def __call__(self, inputs: Any, kwargs: Any) -> Any:
        if self.param_dtype is None:
            return self.module(*inputs, **kwargs)
        cast = {
            name: parameter.to(self.param_dtype)
            for name, parameter in self.module.named_parameters()
            if name not in self.ignored and parameter.is_floating_point()
        }
        return torch.func.functional_call(self.module, cast, inputs, kwargs)
