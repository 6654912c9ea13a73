"""benchmarks/bench_faults.py: made-up times make the tables; each kind of loss is measured once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_faults
import readme_results
from measure.fault_trials import DEADLINE_S, KINDS, FaultCase, measure_fault
from measure.ps_faults import PS_FAULTS, PsFault, measure_ps_fault
from measure.ranks import RankFailed

PAGE = "docs/shared_memory.md"


def test_each_kind_has_its_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_faults, "measure_fault", lambda case: 50.0 + case.world)
    monkeypatch.setattr(bench_faults, "measure_ps_fault", lambda fault, world: 60.0 + world)
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    results = tmp_path / "faults.json"
    assert bench_faults.main(["--tries", "2", "--json", str(results)]) == 0
    assert "left behind" in capsys.readouterr().out
    page = readme_results.written(PAGE)
    for line in (
        "| killed inside | 4 | 54.0 | 54.0 |",
        "| killed, `ssp` | 2 | the signal | 62.0 | 62.0 |",
        "| stopped, `bsp` | 4 | the pull | 64.0 | 64.0 |",
    ):
        assert line in page
    found = json.loads(results.read_text())
    del found["parameter_server"]  # a run before there were such rows has none
    results.write_text(json.dumps(found))
    assert readme_results.written(PAGE).count("\n| --- |") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_ranks_are_measured(kind: str) -> None:
    assert 0 <= measure_fault(FaultCase(kind, 2)) < 30_000


@pytest.mark.parametrize("fault", PS_FAULTS, ids=lambda fault: fault.kind)
def test_losses_of_workers_are_measured(fault: PsFault) -> None:
    least = DEADLINE_S * 1e3 if fault.counted_from == "the pull" else 0
    assert least <= measure_ps_fault(fault, 3) < 30_000


def test_another_text_than_is_expected_is_told() -> None:
    with pytest.raises(RankFailed, match=r"\[ps_faults\] rank 0 got .*has died at clock 3"):
        measure_ps_fault(PsFault("killed", "the signal", "has gone on holiday"), 2)
