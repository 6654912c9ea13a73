"""benchmarks/bench_integrations.py: made-up times make verdicts; one side is measured for real."""

import json
import sys
from pathlib import Path

import pytest

from examples.programs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_integrations
from measure.framework_steps import FrameworkCase


def test_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")

    def made_up(case: FrameworkCase) -> float:
        return 8.0 if case.ours else 10.0

    monkeypatch.setattr(bench_integrations, "step_ms", made_up)
    file = tmp_path / "made_up.json"
    assert bench_integrations.main(["--only", "accelerate", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["accelerate"]["steps"]
    assert found["mlp"]["ratio"]["median"] == pytest.approx(0.8)
    assert found["mlp"]["ratio"]["verdict"] != found["gpt-small-batch"]["ratio"]["verdict"]
    assert len(found["mlp"]["ours_ms"]) == 7
    assert "accelerate, mlp: 8.0 ms; by default 10.0 ms" in capsys.readouterr().out


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_integrations, "find_spec", lambda name: None)
    assert bench_integrations.main(["--only", "lightning"]) == 2


def test_a_real_run() -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    assert bench_integrations.step_ms(FrameworkCase("accelerate", True, "mlp", 2)) > 0
