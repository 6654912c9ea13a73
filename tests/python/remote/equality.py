"""Comparisons of a module elsewhere with a local one: of values, gradients and states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def assert_equal(got: Any, expected: Any) -> None:
    """Compares nested values; tensors have equal bits, and a gradient or none."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def assert_state(net: nn.Module, local: nn.Module, *, is_close: bool = False) -> None:
    ours, expected = dict(net.state_dict()), dict(local.state_dict())
    assert list(ours) == list(expected)
    limits = {"rtol": 1e-5, "atol": 1e-6} if is_close else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ours, expected, **limits)
