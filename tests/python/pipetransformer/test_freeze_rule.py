"""Which layers a rule freezes: pure values."""

import math

import pytest
import trireme
from trireme import _C

from harness.faults import RANKLESS_FORM, raises


@pytest.mark.parametrize(
    ("layers", "alpha", "frozen"),
    [
        (12, 1 / 3, [0, 4, 7, 9, 10, 11, 11, 12]),
        (12, 0.07, [0, 1, 2, 3, 4, 4, 5, 5, 6, 6]),
        (24, 1 / 3, [0, 8, 14, 17, 20, 21, 22, 23, 24]),
        (8, 1 / 2, [0, 4, 6, 7, 8, 8]),
        (0, 1 / 3, [0, 0]),
        (5, 1 / 3, []),
    ],
)
def test_a_schedule(layers: int, alpha: float, frozen: list[int]) -> None:
    assert trireme.freeze_schedule(layers, alpha, len(frozen)) == frozen


def by_gradient(layers: int, frozen: int, norms: list[float], alpha: float = 1 / 3) -> int:
    point = trireme.FreezePoint(layers=layers, frozen=frozen, interval=0, norms=norms)
    return _C.frozen_by_gradient(point, alpha)


def test_up_to_the_smallest_gradient() -> None:
    """Nothing outside is trained, so the last of 8 layers stays: the caller sees to that."""
    table = [
        ([3, 1, 2, 5, 6, 7, 8, 9], 2),
        ([4, 3, 2, 1, 5, 6], 4),
        ([1, 2, 3, 4], 5),
        ([9, 9, 1], 6),
        ([2, 1], 7),
        ([1], 8),
    ]
    frozen = 0
    for norms, expected in table:
        frozen = by_gradient(8, frozen, list(map(float, norms)))
        assert frozen == expected, norms


def test_the_first_of_equals() -> None:
    assert by_gradient(6, 0, [5.0, 2.0, 2.0, 2.0, 2.0, 2.0]) == 2
    assert by_gradient(6, 0, [2.0] * 6) == 1


@pytest.mark.parametrize("norm", [math.inf, math.nan, -math.inf])
def test_a_norm_that_is_not_finite_ends_the_search(norm: float) -> None:
    assert by_gradient(8, 0, [3.0, 2.0, norm, 1.0, 1.0, 1.0, 1.0, 1.0]) == 2
    assert by_gradient(8, 2, [norm, 0.5, 1.0, 1.0, 1.0, 1.0]) == 2
    assert by_gradient(8, 2, [norm] * 6) == 2
    assert by_gradient(8, 8, []) == 8


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5, 1.5, math.nan])
def test_alpha_lies_between(alpha: float) -> None:
    with raises(ValueError, "[freeze] got alpha", form=RANKLESS_FORM):
        trireme.freeze_schedule(12, alpha, 3)
    with raises(ValueError, "none below 0", form=RANKLESS_FORM):
        trireme.freeze_schedule(-1, 0.5, 3)
