"""What an optimizer that Trireme's C++ core steps is, and Adam as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trireme import _C
from trireme._core.errors import Area

Group = dict[str, Any]
State = dict[str, Any]

# Parameters of these dtypes have fp32 states, where torch's optimizers round the states too.
_LOW_PRECISION = (torch.bfloat16, torch.float16, torch.complex32)


class FusedOptimizer(torch.optim.Optimizer):
    """Adam, AdamW and SGD share this; see :class:`trireme.optim.AdamW`."""

    _step_supports_amp_scaling = True

    def add_param_group(self, param_group: Group) -> None:
        """Does what torch's does; refuses a group that asks for what the fused step cannot do."""
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
        """Does what torch's does, also with a state of torch's class; states of bf16 and fp16
        parameters are fp32."""
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
        """Returns what a GradScaler leaves here for the time of a step."""
        return {
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }


class FusedAdam(FusedOptimizer):
    def _step_group(self, group: Group) -> None:
        params, grads = with_grad(group)
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


def _check_flags(name: str, group: Group) -> None:
    for flag in ("capturable", "differentiable"):
        if group.get(flag):
            Area("optim").refuse(
                f"got {flag}=True for {name}, expected False",
                "Use torch's own class.",
                kind=RuntimeError
                if group.get("fused") and flag == "differentiable"
                else ValueError,
            )


def with_grad(group: Group) -> tuple[list[Tensor], list[Tensor]]:
    params = group["params"]
    grads = [param.grad for param in params]
    if any(grad is None for grad in grads):
        pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
        return [p for p, _ in pairs], [g for _, g in pairs]
    return params, grads


def loaded_state_dtype(
    optimizer: torch.optim.Optimizer, param: Tensor, key: str, saved: torch.dtype
) -> torch.dtype:
    """Returns what ``optimizer.load_state_dict`` makes of a state that was saved in this dtype;
    that itself, where its class has a ``load_state_dict`` of its own."""
    if key == "step" or not saved.is_floating_point or not param.is_floating_point():
        return saved
    if isinstance(optimizer, FusedOptimizer):
        return _state_dtype(param)
    is_torchs = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return param.dtype if is_torchs else saved


def _state_dtype(param: Tensor) -> torch.dtype:
    if param.dtype not in _LOW_PRECISION:
        return param.dtype
    return torch.complex64 if param.is_complex() else torch.float32


def zeros_like(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=_state_dtype(param), memory_format=torch.preserve_format)


def init_adam(param: Tensor, state: State, group: Group) -> None:
    # On the device, so that a GradScaler need not wait for it.
    device = param.device if param.is_cuda else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    state["exp_avg"] = zeros_like(param)
    state["exp_avg_sq"] = zeros_like(param)
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = zeros_like(param)


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
