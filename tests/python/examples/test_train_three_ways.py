"""examples/python/train_three_ways.py: three ways of one process learn the same."""

import re

import pytest

from examples.test_train_ddp import ROOT, run


@pytest.mark.parametrize("parts", ["2", "3"])
def test_all_ways_reach_the_same_losses(parts: str) -> None:
    said = run([str(ROOT / "examples" / "python" / "train_three_ways.py")], 1, parts)
    steps = re.findall(r"^step .*$", said, re.MULTILINE)
    assert len(steps) == 6
    for step in steps:
        placed, pipelined, data_parallel = map(float, re.findall(r"\d+\.\d{6}", step))
        assert pipelined == pytest.approx(placed, rel=1e-4)
        assert data_parallel == pytest.approx(placed, rel=1e-4)
    assert re.findall(r"([a-z-]+): \d+\.\d\d ms", said) == ["placed", "pipelined", "data-parallel"]
