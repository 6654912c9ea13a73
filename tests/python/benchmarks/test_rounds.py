"""benchmarks/bench_rounds.py: made-up times make the tables; a side is trained for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_rounds

pytestmark = pytest.mark.usefixtures("forked_measure")

STEP_MS = {
    bench_rounds.DDP: 5000.0,
    bench_rounds.ALONE: 100.0,
    "DiLoCo at once": 200.0,
    "DiLoCo in fragments": 110.0,
    "SparseLoCo": 160.0,
}


def test_verdicts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {}

    def run_side(
        side: str, rate: str | None, period: int, count: int, tiny: bool
    ) -> dict[str, float]:
        assert rate == "100mbit" and not tiny
        steps[side] = (period, count)
        return {"step_ms": STEP_MS.get(side, 300.0), "sent": 1e6}

    monkeypatch.setattr(bench_rounds, "run_side", run_side)
    found = tmp_path / "rounds.json"
    assert bench_rounds.main(["--only", "100mbit", "--json", str(found)]) == 0
    ratios = json.loads(found.read_text())["100mbit"]["ratios"]
    assert {name: ratio["verdict"] for name, ratio in ratios.items()} == {
        "DiLoCo at once / torch DDP": "met",
        "DiLoCo in fragments / torch DDP": "met",
        "SparseLoCo / torch DDP": "missed",
        "DiLoCo in fragments / no exchange": "met",
    }
    assert steps["SparseLoCo"] == (30, 60) and steps["DiLoCo at once"] == (50, 100)
    assert "DiLoCo in fragments" in capsys.readouterr().out


def test_a_side_for_real() -> None:
    run = bench_rounds.run_side("DiLoCo in fragments", None, 10, 10, tiny=True)
    assert run["step_ms"] > 0
