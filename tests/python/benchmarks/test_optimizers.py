"""benchmarks/bench_optimizers.py runs, writes what it measured and names wrong input."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_optimizers
import torch


def test_a_tiny_run_measures_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    command = ["--tiny", "--quick", "--threads", "1", "--json", str(file)]
    assert bench_optimizers.main(command) == 0
    rows = json.loads(file.read_text())["devices"]["cpu, 1 threads"]
    assert list(rows) == [case.label for case in bench_optimizers.CASES]
    for label, row in rows.items():
        assert row["step_ms"] > 0
        assert len(row["time_ratio"]["ratios"]) >= 3
        assert ("in_place_ratio" in row) == ("small" not in label)
    # AdamW reads p, g, m, v and writes p, m, v; SGD has no v; bf16 is p and g in 2 bytes.
    numel = rows["AdamW, flat, float32"]["numel"]
    assert rows["AdamW, flat, float32"]["bytes"] == 28 * numel
    assert rows["SGD, flat, float32"]["bytes"] == 20 * numel
    assert rows["AdamW, flat, bfloat16"]["bytes"] == 22 * numel
    assert "slowest beside torch: " in capsys.readouterr().out


def test_both_sides_step_the_same_memory() -> None:
    case = bench_optimizers.CASES[0]
    pair = bench_optimizers.Pair(case, [torch.Size([100])], torch.device("cpu"))
    parameter = pair.parameters[0]
    state = pair.ours.state[parameter]
    before = parameter.detach().clone()
    pair.torchs.step()
    between = parameter.detach().clone()
    pair.ours.step()
    assert not torch.equal(before, between)
    assert not torch.equal(between, parameter)
    assert float(state["step"]) == 3  # one made the states


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_optimizers.main(["--threads", "0"]) == 2
    text = "[bench_optimizers] got --threads 0, expected at least 1. Raise --threads."
    assert text in capsys.readouterr().err
