"""benchmarks/bench_ps.py: made-up times make the tables; one size is measured for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_ps
import readme_results
from harness.ps_rounds import PsCase, measure_ps

SIDES = (
    *("rpc push", "rpc pull", "gloo push", "gloo pull", "ours push", "ours pull"),
    *("ours pull, new tensors", "ours pull, bound", "copy"),
)


def test_ratios_and_verdicts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    times = {**{side: [10.0, 10.0] for side in SIDES}, "rpc push": [100.0, 300.0]}
    monkeypatch.setattr(bench_ps, "measure_ps", lambda case: times)
    assert bench_ps.main(["--quick", "--json", str(tmp_path / "ps.json")]) == 0
    found = json.loads((tmp_path / "ps.json").read_text())["sizes"]
    assert list(found) == ["4 B", "1 MiB", "25 MiB"]
    assert found["1 MiB"]["ratios_to_rpc"]["ours push"]["verdict"] == "met"
    assert found["4 B"]["ratios_to_rpc"]["ours pull"]["verdict"] == "missed"
    assert "15.0x rpc push, target 5x: met" in capsys.readouterr().out


def test_all_sides_are_measured() -> None:
    found = measure_ps(PsCase(4096, 1))
    assert tuple(found) == SIDES
    assert all(len(times) == 1 and times[0] > 0 for times in found.values())


def test_the_page_has_a_row_for_each_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = {**{side: [10.0, 10.0] for side in SIDES}, "rpc push": [100.0, 300.0]}
    monkeypatch.setattr(bench_ps, "measure_ps", lambda case: times)
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    bench_ps.main(["--json", str(tmp_path / "ps.json")])
    page = readme_results.written("docs/parameter_server.md")
    assert "| push, 1 MiB | 10.0 |  | 200.0 | 10.0 |  | 15.0x (" in page
    assert (
        "| pull, 25 MiB | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 | 1.0x (1.0 to 1.0) | 2.2x: missed |"
        in page
    )
