"""What the tests of DataParallel share: modules, data, and one process on the whole batch.

    def test_something() -> None:
        ours, one = pair(mlp)
        assert_same_backward(ours, one, batch(0))

There are no ranks: the replicas are threads of the test's process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn

from harness.training import gradients

DP = trireme.DataParallel
Make = Callable[[], nn.Module]

# [data_parallel] got ..., expected .... next step
HOUSE_FORM = re.compile(r"^\[data_parallel\] got \S.*, expected \S.*\. [A-Z].*\.$", re.DOTALL)

# Threads that wait for each other in C++ hear no signal: only the process can be ended.
TIME_LIMIT = pytest.mark.timeout(110, method="thread")


class Called(nn.Module):
    """Its forward is ``function(self, *inputs)``, its parts are what is named."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def pair(make: Make, replicas: int = 2, **options: Any) -> tuple[trireme.DataParallel, nn.Module]:
    """A wrapped module and an equal one for one process."""
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(0)
    return DP(module, replicas=replicas, **options), make()


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns numbers whose sums and products are exact in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def in_whole_numbers(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(whole_numbers(*parameter.shape, seed=i))
    return module


def square_mean(output: Tensor) -> Tensor:
    return (torch.view_as_real(output) if output.is_complex() else output).square().mean()


def backward(
    module: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] = square_mean, **named: Any
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of one batch, and the gradients of it alone."""
    module.zero_grad()
    result = loss(module(*inputs, **named))
    result.backward()
    return result.detach(), gradients(module)


def assert_close(got: Any, expected: Any, **tolerance: float) -> None:
    """Equal but for the order of sums: ``tolerance`` is for double precision if not given."""
    torch.testing.assert_close(got, expected, **{"rtol": 1e-9, "atol": 1e-11, **tolerance})


def assert_same_backward(
    ours: nn.Module,
    one: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] = square_mean,
    tolerance: dict[str, float] | None = None,
    **named: Any,
) -> None:
    expected = backward(one, *inputs, loss=loss, **named)
    assert any(grad is not None for grad in expected[1].values())
    assert_close(backward(ours, *inputs, loss=loss, **named), expected, **(tolerance or {}))


EXACT = {"rtol": 0.0, "atol": 0.0}
SINGLE = {"rtol": 1e-5, "atol": 1e-6}
