"""Adam, AdamW and SGD: torch's classes, stepped by Trireme's C++ core in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trireme import _C

Group = dict[str, Any]
State = dict[str, Any]

# Parameters of these dtypes have fp32 states, where torch's optimizers round the states too.
_LOW_PRECISION = (torch.bfloat16, torch.float16, torch.complex32)


class _Fused(torch.optim.Optimizer):
    """What the three classes share; see :class:`AdamW`."""

    _step_supports_amp_scaling = True

    def add_param_group(self, param_group: Group) -> None:
        """As in torch; a group that asks for what the fused step cannot do is refused."""
        _check_flags(type(self).__name__, {**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, also from torch's own class; states of bf16 and fp16 parameters are fp32."""
        for group in state_dict["param_groups"]:
            _check_flags(type(self).__name__, group)
        held_back: dict[Tensor, State] = {}
        # Registered last, it sees what the user's hooks made of the dictionary.
        handle = self.register_load_state_dict_pre_hook(
            lambda _, loaded: self._hold_back(loaded, held_back)
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for param, state in held_back.items():
            self.state[param] |= state

    def _hold_back(self, loaded: dict[str, Any], held_back: dict[Tensor, State]) -> dict[str, Any]:
        """``loaded`` without what torch would round to the dtype of its parameter."""
        states = dict(loaded["state"])
        # What does not fit, torch refuses.
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=False):
            for param, key in zip(group["params"], saved["params"], strict=False):
                if param.dtype not in _LOW_PRECISION or key not in states:
                    continue
                held_back[param] = {
                    name: value.to(device=param.device, dtype=_state_dtype(param))
                    for name, value in states[key].items()
                    if isinstance(value, Tensor) and name != "step"
                }
                states[key] = {
                    name: value
                    for name, value in states[key].items()
                    if name not in held_back[param]
                }
        return {**loaded, "state": states}

    def _step_group(self, group: Group) -> None:
        raise NotImplementedError

    def _scaling(self) -> dict[str, Tensor | None]:
        """What a GradScaler leaves here for the time of a step."""
        return {
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }


class _FusedAdam(_Fused):
    def _step_group(self, group: Group) -> None:
        params, grads = _with_grad(group)
        if not params:
            return
        states = [self.state[param] for param in params]
        if not all(states):
            for param, state in zip(params, states, strict=True):
                if not state:
                    init_adam(param, state, group)
        amsgrad = group["amsgrad"]
        _C.adam_step(
            params=params,
            grads=grads,
            exp_avgs=[state["exp_avg"] for state in states],
            exp_avg_sqs=[state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[state["max_exp_avg_sq"] for state in states] if amsgrad else [],
            steps=[state["step"] for state in states],
            options=adam_options(group),
            **self._scaling(),
        )


class Adam(_FusedAdam, torch.optim.Adam):
    """``torch.optim.Adam``, fused; see :class:`AdamW`."""


class AdamW(_FusedAdam, torch.optim.AdamW):
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
        TypeError: (from ``step``) a sparse gradient; a dtype other than fp32, fp64, fp16, bf16.
    """


class SGD(_Fused, torch.optim.SGD):
    """``torch.optim.SGD``, fused; see :class:`AdamW`. Sparse gradients are refused."""

    def _step_group(self, group: Group) -> None:
        params, grads = _with_grad(group)
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
        buffers = [_zeros_like(param) for param in params]
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


def _check_flags(name: str, group: Group) -> None:
    for flag in ("capturable", "differentiable"):
        if group.get(flag):
            text = _C.error_text(
                "optim", f"got {flag}=True for {name}, expected False", "Use torch's own class."
            )
            raise ValueError(text)


def _with_grad(group: Group) -> tuple[list[Tensor], list[Tensor]]:
    params = group["params"]
    grads = [param.grad for param in params]
    if any(grad is None for grad in grads):
        pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
        return [p for p, _ in pairs], [g for _, g in pairs]
    return params, grads


def loaded_state_dtype(
    optimizer: torch.optim.Optimizer, param: Tensor, key: str, saved: torch.dtype
) -> torch.dtype:
    """What ``optimizer.load_state_dict`` makes of a state that was saved in this dtype; that
    itself, where its class has a ``load_state_dict`` of its own."""
    if key == "step" or not saved.is_floating_point or not param.is_floating_point():
        return saved
    if isinstance(optimizer, _Fused):
        return _state_dtype(param)
    is_torchs = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return param.dtype if is_torchs else saved


def _state_dtype(param: Tensor) -> torch.dtype:
    if param.dtype not in _LOW_PRECISION:
        return param.dtype
    return torch.complex64 if param.is_complex() else torch.float32


def _zeros_like(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=_state_dtype(param), memory_format=torch.preserve_format)


def init_adam(param: Tensor, state: State, group: Group) -> None:
    # On the device, so that a GradScaler need not wait for it.
    device = param.device if param.is_cuda else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    state["exp_avg"] = _zeros_like(param)
    state["exp_avg_sq"] = _zeros_like(param)
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = _zeros_like(param)


def adam_options(group: Group) -> _C.AdamStepOptions:
    options = _C.AdamStepOptions()
    options.lr = float(group["lr"])
    options.beta1, options.beta2 = map(float, group["betas"])
    options.eps = group["eps"]
    options.weight_decay = group["weight_decay"]
    options.decoupled_weight_decay = group["decoupled_weight_decay"]
    options.amsgrad = group["amsgrad"]
    options.maximize = group["maximize"]
    return options


def _sgd_options(group: Group) -> _C.SgdStepOptions:
    options = _C.SgdStepOptions()
    options.lr = float(group["lr"])
    options.momentum = group["momentum"]
    options.dampening = group["dampening"]
    options.weight_decay = float(group["weight_decay"])
    options.nesterov = group["nesterov"]
    options.maximize = group["maximize"]
    return options
