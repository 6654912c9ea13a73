"""``extra`` comes back as Python's json gave it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import trireme
from torch import nn

from harness.faults import raises
from harness.models import mlp


def through(extra: Any, path: Path) -> Any:
    trireme.save_checkpoint(path, mlp(), extra=extra)
    return trireme.load_checkpoint(path, mlp())


def test_random_states_resume_with_the_same_draws(tmp_path: Path) -> None:
    ours, python = numpy.random.default_rng(3), random.Random(4)
    ours.random(5), python.gauss(0, 1)
    version, internal, gauss = python.getstate()
    extra = {"numpy": ours.bit_generator.state, "python": [version, list(internal), gauss]}
    assert extra["numpy"]["state"]["state"] >= 2**64  # PCG64 has 128 bits
    loaded = through(extra, tmp_path / "ck")
    assert loaded == extra and type(loaded["numpy"]["state"]["state"]) is int
    again, python_again = numpy.random.default_rng(), random.Random()
    again.bit_generator.state = loaded["numpy"]
    version, internal, gauss = loaded["python"]
    python_again.setstate((version, tuple(internal), gauss))
    assert again.random(100).tolist() == ours.random(100).tolist()
    expected = [python.gauss(0, 1) for _ in range(100)]
    assert [python_again.gauss(0, 1) for _ in range(100)] == expected


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    extra = {
        "integers": [2**53 + 1, -(2**63), 2**63, 2**64, -(2**64) - 1, 10**400 + 1, 7**4900],
        "floats": [1.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, 1e22],
        "others": [True, False, None, "", '\u00e9\U0001f600\u0000\u2028"\\/', {}, [], {"": {}}],
        "z": 1,
        "a": deep,
    }
    loaded = through(extra, tmp_path / "ck")
    assert json.dumps(loaded) == json.dumps(extra)  # also types, signs of zero, order of keys
    assert (tmp_path / "ck" / "extra.json").read_text() == json.dumps(extra)


def test_integers_in_the_state_of_an_optimizer(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = made()
    for parameter in model.parameters():
        optimizer.state[parameter] = {"drawn": 2**64 - 1, "moved": 0.1}
    optimizer.param_groups[0]["seed"] = -(2**63)
    trireme.save_checkpoint(tmp_path / "ck", model, optimizer)
    fresh, loaded = made()
    trireme.load_checkpoint(tmp_path / "ck", fresh, loaded)
    assert loaded.param_groups[0]["seed"] == -(2**63)
    for parameter in fresh.parameters():
        assert loaded.state[parameter] == {"drawn": 2**64 - 1, "moved": 0.1}
    optimizer.param_groups[0]["seed"] = 2**64
    with raises(ValueError, "'optimizer.json' with an integer of more than 64 bits"):
        trireme.save_checkpoint(tmp_path / "ck", model, optimizer)


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("extra", "kind", "told"),
    [
        ({"a": "\ud800"}, ValueError, "surrogate U+D"),
        ({"\udc00": 1}, ValueError, "surrogate U+D"),
        (_nested(501), ValueError, "nested deeper than 500"),
        (_nested(5000), TypeError, "which JSON cannot say"),
        ({"a": 10**5000}, TypeError, "which JSON cannot say"),
        ([1, 2], ValueError, "expected a JSON object"),
    ],
)
def test_what_cannot_be_kept(extra: Any, kind: type[Exception], told: str, tmp_path: Path) -> None:
    with raises(kind, "[saving] got `extra`", told):
        through(extra, tmp_path / "ck")
    assert not list(tmp_path.iterdir())
