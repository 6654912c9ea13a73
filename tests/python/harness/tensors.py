"""Tensors compared bit for bit."""

from collections.abc import Sequence
from typing import Any

import torch


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().reshape(-1).view(torch.uint8)


def assert_bits(got: torch.Tensor, expected: torch.Tensor, *case: object) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, case
    if not torch.equal(bits(got), bits(expected)):
        raise AssertionError(f"{case}: got {got.flatten()[:8]}, expected {expected.flatten()[:8]}")


def assert_lists(got: Sequence[Any], expected: Sequence[Any], *case: object) -> None:
    assert len(got) == len(expected), case
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_bits(one, other, *case, index)
