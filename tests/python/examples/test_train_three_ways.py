"""examples/python/train_three_ways.py: three ways of one process learn the same."""

import re

import pytest

from examples.programs import ROOT, run


@pytest.mark.parametrize("parts", ["2", "3"])
def test_all_ways_reach_the_same_losses(parts: str) -> None:
    said = run([str(ROOT / "examples" / "python" / "train_three_ways.py")], 1, parts)
    steps = re.findall(r"^step .*$", said, re.MULTILINE)
    assert len(steps) == 4
    for number, step in enumerate(steps):
        placed, pipelined, data_parallel = map(float, re.findall(r"\d+\.\d{6}", step))
        # Sums in another order, and what 60 steps of Adam make of them.
        near = 5e-3 if number > 0 else 1e-6
        assert pipelined == pytest.approx(placed, rel=near)
        assert data_parallel == pytest.approx(placed, rel=near)
    assert re.findall(r"([a-z-]+): \d+\.\d\d ms", said) == ["placed", "pipelined", "data-parallel"]
