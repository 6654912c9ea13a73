"""benchmarks/bench_steps.py: who is measured against whom, and what pages say of it."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_steps
import readme_results
from measure.fresh_run import RunTimes
from measure.sides import TORCH_DDP, Side
from measure.step_runs import measure_all
from workloads import WORKLOADS, WorkloadOptions

STEP_MS = {
    **{"1 process": 80.0, "no sync": 90.0, "dp": 106.0},
    **{"torch-ddp": 150.0, "torch-ddp + view": 160.0, "torch-ddp + view + batched": 170.0},
    **{"torch-zero1": 190.0, "torch-zero1 + view": 180.0},
    **{"torch-fsdp2": 400.0, "torch-fsdp2, kept": 380.0},
    **{"torch-fsdp2, foreach": 390.0, "torch-fsdp2, kept, foreach": 360.0},
    **{"ddp": 100.0, "ddp, Gloo": 151.0, "zero1": 95.0, "zero2": 75.0, "zero2, Gloo": 200.0},
    **{"zero2, trireme.optim": 74.0, "zero2, fused step": 60.0},
    **{"fsdp": 70.0, "fsdp, foreach": 90.0, "fsdp, trireme.optim": 65.0},
    **{"fsdp, Gloo": 310.0, "fsdp, Gloo, kept": 300.0},
    **{"fsdp, Gloo, foreach": 340.0, "fsdp, Gloo, kept, foreach": 324.0},
}


def _run_times(step_ms: float) -> RunTimes:
    return RunTimes(**{field.name: step_ms for field in dataclasses.fields(RunTimes)})


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(side: Side, workload: str, steps: int) -> RunTimes:
        small = workload == "trees" and side.strategy not in ("single", "dp")
        return _run_times(STEP_MS[side.label] / (4 if small else 1))

    monkeypatch.setattr(bench_steps, "run_fresh", run)


def _contests(workload: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(c["ours"], c["theirs"], c["ratio"]["verdict"]) for c in workload["contests"]]


@pytest.mark.usefixtures("made_up")
def test_the_fastest_options_of_torch_are_the_opponent(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    assert bench_steps.main(["--only", "mlp", "--json", str(file)]) == 0
    mlp = json.loads(file.read_text())["workloads"]["mlp"]
    assert _contests(mlp) == [
        ("ddp", "torch-ddp", "met within noise (3 %)"),
        ("ddp, Gloo", "torch-ddp", "met within noise (3 %)"),
        ("zero1", "ddp", "missed"),
        ("zero2", "torch-ddp", "met"),
        ("fsdp, foreach", "torch-fsdp2, kept, foreach", "missed"),  # both sides have one AdamW
        ("fsdp", "torch-ddp", "met"),
        ("fsdp", "ddp", "met"),
        ("fsdp, Gloo, kept, foreach", "torch-fsdp2, kept, foreach", "missed"),
        ("dp", "ddp", "met within noise (3 %)"),
    ]
    assert mlp["contests"][3]["ratio"]["ratios"] == pytest.approx([0.5] * 7)
    assert mlp["torch_best"] == "torch-ddp"
    assert mlp["memory"]["ratio"] == pytest.approx(100 / 160)
    lacking = {"torch-ddp + view + batched"} - {side.label for side in TORCH_DDP}
    assert mlp["runs"].keys() == STEP_MS.keys() - lacking
    met = {label for contest in mlp["contests"] for label in (contest["ours"], contest["theirs"])}
    for label, runs in mlp["runs"].items():
        beside = label in ("1 process", "no sync")
        assert len(runs) == (8 if label in met or beside else 1)


@pytest.mark.usefixtures("made_up")
def test_parts_are_added_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    adding = ["--quick", "--add", "--json", str(file)]
    assert bench_steps.main(["--only", "mlp", *adding]) == 2
    assert "[bench_steps] got --add, expected --json with a file" in capsys.readouterr().err
    assert bench_steps.main(["--only", "narrow", "--quick", "--json", str(file)]) == 0
    assert bench_steps.main(["--only", "mlp", *adding]) == 0
    found = json.loads(file.read_text())
    assert found["workloads"].keys() == found["commits"].keys() == {"narrow", "mlp"}
    assert bench_steps.main(["--only", "narow"]) == 2
    assert "Did you mean 'narrow'?" in capsys.readouterr().err


@pytest.mark.usefixtures("made_up")
def test_pages_show_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    assert "No run is committed yet" in readme_results.written("docs/benchmarks.md")
    assert bench_steps.main(["--json", str(tmp_path / "steps.json")]) == 0
    line = "| `mlp` | 75 (zero2) | 150 (torch-ddp) | 0.500 (0.500 to 0.500) | 80 | 90 |"
    page = readme_results.written("docs/benchmarks.md")
    assert line in page
    assert "| fsdp, trireme.optim | 65.0 | 65.0 | 65.0 | 65.0 | 1 |" in page
    assert line in readme_results.written("docs/zero.md")
    assert line not in readme_results.written("docs/ddp.md")
    assert "Peak memory of a rank, ddp / torch-ddp + view: 0.62 (`mlp`)" in (
        readme_results.written("docs/ddp.md")
    )
    strategies = readme_results.written("docs/strategies.md")
    assert "|  | `mlp` | `gpt-small-batch` | `gpt` | `narrow` | `trees` |" in strategies
    assert "| torch FSDP2 | 2.40 | 2.40 | 2.40 |  |  |" in strategies
    assert "| fully_shard | 0.47 | 0.47 | 0.47 |  |  |" in strategies
    said = readme_results.written("README.md")
    assert "| ZeRO 2 / torch's DDP | 0.50 | 0.50 | 0.50 |  |" in page
    assert "| `fully_shard` / torch's FSDP2 | 0.25 | 0.25 | 0.25 |  |" in page
    # Sides that ran once are not named.
    assert "`trees` 80 ms, the best ranks 19 (zero2)" in said
    assert "ddp, Gloo on `mlp` 1.01 of torch-ddp" in page


@pytest.mark.usefixtures("made_up")
def test_the_picture_tells_of_which_figures_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    monkeypatch.setattr(readme_results, "PICTURE", tmp_path / "steps.svg")
    monkeypatch.setattr(readme_results, "PAGES", {})
    monkeypatch.setattr(readme_results, "lacking", lambda files: ())
    assert bench_steps.main(["--quick", "--json", str(tmp_path / "steps.json")]) == 0
    assert readme_results.main(["--check"]) == 1
    assert "got figures in" in capsys.readouterr().out
    assert readme_results.main([]) == readme_results.main(["--check"]) == 0
    drawn = (tmp_path / "steps.svg").read_text()
    assert "Trireme ZeRO 2" in drawn and "torch FSDP2" in drawn
    (tmp_path / "steps.svg").write_text(drawn.replace("'ZeRO 2': 75", "'ZeRO 2': 74"))
    assert readme_results.main(["--check"]) == 1


def test_odd_rounds_are_reversed() -> None:
    calls: list[str] = []

    def measure(side: Side) -> int:
        calls.append(side.label)
        return len(calls)

    found = measure_all([Side("A", "", {}), Side("B", "", {})], 3, measure)
    assert calls == ["A", "B", "B", "A", "A", "B"]
    assert found == {"A": [1, 4, 5], "B": [2, 3, 6]}


def test_trees_are_merged_to_one() -> None:
    """Every merge of a row names two neighbours that are there, and the loss has all gradients."""
    workload = WORKLOADS["trees"](WorkloadOptions(tiny=True))
    rows = workload.samples().rows(torch.arange(5))
    leaves = (rows.inputs.shape[1] + 1) // 2
    merges = rows.inputs[:, leaves:]
    assert (merges >= 0).all() and (merges < torch.arange(leaves - 1, 0, -1)).all()
    model = workload.model()
    workload.loss(model(rows.inputs), rows).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
