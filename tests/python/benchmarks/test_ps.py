"""benchmarks/bench_ps.py: made-up times make the tables; each part is measured once for real."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_ps
import readme_results
from measure.bad_input import BadInput
from measure.fresh_run import RunTimes
from measure.ps_rounds import PsCase, measure_ps
from measure.ps_rows import NAMES, RowsCase, measure_rows
from measure.ps_updates import UpdatesCase, measure_updates
from measure.straggler_runs import BSP, Straggled, StragglerCase, measure_stragglers

pytestmark = pytest.mark.usefixtures("forked_measure")

SIDES = (
    *("rpc push", "rpc pull", "gloo push", "gloo pull", "ours push", "ours pull"),
    *("ours pull, new tensors", "ours pull, bound", "copy"),
)
RATES = {"bsp": 50.0, "bsp-backup-1": 150.0, "ssp-3": 50.0, "async": 120.0}


def _straggled(case: StragglerCase) -> list[Straggled]:
    return [
        Straggled(pattern, mode, rate, None if mode == BSP else 2.0 + case.seed)
        for pattern in ("always", "sometimes")
        for mode, rate in RATES.items()
    ]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What the page says of made-up times of all parts."""
    times = {**{side: [10.0, 10.0] for side in SIDES}, "rpc push": [100.0, 300.0]}
    rows = {name: [100.0, 100.0] for name in NAMES} | {"pull": [150.0, 150.0]}
    step = RunTimes(**{field.name: 7.0 for field in dataclasses.fields(RunTimes)})
    cpp = {"pull": [1.0, 1.2], "push": [2.0, 2.0], "pull, bound": [0.5]}
    monkeypatch.setattr(bench_ps, "measure_ps", lambda case: times)
    monkeypatch.setattr(bench_ps, "measure_rows", lambda case: rows)
    monkeypatch.setattr(
        bench_ps, "measure_updates", lambda case: {"rpc": [5000.0] * 2, "ours": [1000.0] * 2}
    )
    monkeypatch.setattr(bench_ps, "run_fresh", lambda side, workload, steps: step)
    monkeypatch.setattr(bench_ps, "measure_stragglers", _straggled)
    monkeypatch.setattr(bench_ps, "run_program", lambda rounds: json.dumps(cpp))
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    assert bench_ps.main(["--json", str(tmp_path / "ps.json")]) == 0
    return readme_results.written("docs/parameter_server.md")


def test_ratios_and_verdicts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    times = {**{side: [10.0, 10.0] for side in SIDES}, "rpc push": [100.0, 300.0]}
    monkeypatch.setattr(bench_ps, "measure_ps", lambda case: times)
    options = ["--quick", "--only", "messages", "--json", str(tmp_path / "ps.json")]
    assert bench_ps.main(options) == 0
    found = json.loads((tmp_path / "ps.json").read_text())["sizes"]
    assert list(found) == ["4 B", "1 MiB", "25 MiB"]
    assert found["1 MiB"]["ratios_to_rpc"]["ours push"]["verdict"] == "met"
    assert found["4 B"]["ratios_to_rpc"]["ours pull"]["verdict"] == "missed"
    assert "15.0x rpc push, target 5x: met" in capsys.readouterr().out
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    written = readme_results.written("docs/parameter_server.md")
    assert written.count("\n| --- |") == 1  # parts that were not run have no table


def test_each_part_has_its_table(page: str) -> None:
    for line in (
        "| push, 1 MiB | 10.0 |  | 200.0 | 10.0 |  | 15.0x (",
        "| pull, 25 MiB | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 | 1.0x (1.0 to 1.0) |",
        "| pull | 150 | 27.3 | 67% |",
        "| dense, W = 2 | 1000 | 200 | 5.0x (5.0 to 5.0) |",
        "| sparse, W = 4 | 1000 | 200 | 5.0x (5.0 to 5.0) |",
        "| 7.0 | 7.0 | 1.000 (1.000 to 1.000) |",
        "| one worker is always slow | `bsp` | 50 | 1.00 | not reached |",
        "| one worker is always slow | `bsp-backup-1` | 150 | 3.00 | 3.0 |",
        "| one worker is always slow | `async` | 120 | 2.40 | 3.0 |",
        "| each step is slow with a probability of 1/4 | `ssp-3` | 50 | 1.00 | 3.0 |",
        "| push | 2.00 |",
        "| pull, bound | 0.50 |",
    ):
        assert line in page


def test_all_sides_are_measured() -> None:
    found = measure_ps(PsCase(4096, 1))
    assert tuple(found) == SIDES
    assert all(len(times) == 1 and times[0] > 0 for times in found.values())


def test_rows_are_measured() -> None:
    found = measure_rows(RowsCase(rows=50, dim=4, ids=8, calls=2, rounds=3))
    assert tuple(found) == NAMES
    assert all(len(times) == 3 and min(times) > 0 for times in found.values())


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_updates_are_measured(kind: str) -> None:
    case = UpdatesCase(kind, 2, calls=2, rounds=2, width=4, rows=50, dim=4, ids=8)
    found = measure_updates(case)
    assert tuple(found) == ("rpc", "ours")
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())


def test_slow_workers_are_measured() -> None:
    runs = measure_stragglers(StragglerCase(seed=0, seconds=0.1, step_ms=1.0, slow_ms=4.0))
    assert len(runs) == 12 and len({(run.pattern, run.mode) for run in runs}) == 12
    assert all(run.updates_per_s > 0 for run in runs)
    for pattern, targets in bench_ps.STRAGGLER_TARGETS.items():
        assert {(pattern, mode) for mode in targets} <= {(run.pattern, run.mode) for run in runs}


def test_the_program_measures_verbs_of_cpp() -> None:
    try:
        found = json.loads(bench_ps.run_program(2, calls=50))
    except BadInput:
        pytest.skip("the C++ benchmarks are not built beside this package")
    assert {*bench_ps.CPP_WITH_TARGET} < found.keys()
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
