"""What the tests of trireme.optim share: the options, and the same steps for two optimizers."""

from collections.abc import Callable
from typing import Any

import torch
import trireme.optim
from torch import Tensor, nn

ADAMS = ("Adam", "AdamW")
NAMES = (*ADAMS, "SGD")
SHAPES = [(1,), (7,), (64,), (33, 65), (0, 3), (300, 301)]
ADAM_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.3, 0.5), "eps": 1e-3},
]
SGD_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
]
CASES = [(name, options) for name in ADAMS for options in ADAM_OPTIONS]
CASES += [("SGD", options) for options in SGD_OPTIONS]


def ours(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    kind: Callable[..., torch.optim.Optimizer] = getattr(trireme.optim, name)
    return kind(params, **{"lr": 1e-2, **options})


def torchs(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind(params, **{"lr": 1e-2, **options})


def magnitudes(shape: Any, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-6, 1)).to(dtype)


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [nn.Parameter(magnitudes(shape, dtype)) for shape in SHAPES]


def set_grads(params: list[Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        param.grad = magnitudes(param.shape, param.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_grads([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()


def assert_same_but_for_the_tail(got: Tensor, expected: Tensor) -> None:
    """Torch rounds what its vectors of 32 bytes leave over in another order."""
    numel = expected.numel() // (32 // expected.element_size()) * (32 // expected.element_size())
    a, b = got.detach().flatten(), expected.detach().flatten()
    assert torch.equal(a[:numel], b[:numel])
    rounding = 1e-14 if expected.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(a[numel:], b[numel:], rtol=rounding, atol=rounding)


def assert_equal_states(got: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for (param, state), (twin, other) in zip(
        got.state.items(), expected.state.items(), strict=True
    ):
        assert_same_but_for_the_tail(param, twin)
        assert state.keys() == other.keys()
        for name in state:
            assert state[name].shape == other[name].shape
            assert_same_but_for_the_tail(state[name].reshape(-1), other[name].reshape(-1))
