"""benchmarks/bench_fsdp.py: who is measured against whom, what units cost, the widest model."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_fsdp
import readme_fsdp
import readme_results
from harness.engine_cost import measure_engine_cost
from harness.fresh_run import RunTimes
from harness.host_memory import HostMemory, measure_host_memory
from harness.pairs import TORCH, Side
from harness.peak_memory import Fitting, measure_peak, watching, widest_fitting
from harness.reducer_overhead import Overhead
from workloads import WORKLOADS, WorkloadOptions

STEP_MS = {
    **{"1 process": 80.0, "2 ranks, no sync": 90.0},
    **{"torch-ddp": 150.0, "torch-ddp + view": 160.0, "torch-ddp + view + batched": 170.0},
    **{"torch-fsdp2": 400.0, "torch-fsdp2, kept": 380.0},
    **{"torch-fsdp2, foreach": 390.0, "torch-fsdp2, kept, foreach": 360.0},
    **{"zero1": 95.0, "zero2": 80.0, "ddp, shared memory": 100.0},
    **{"fsdp": 75.0, "fsdp, foreach": 90.0, "fsdp, trireme.optim": 70.0},
    **{"fsdp, Gloo": 310.0, "fsdp, Gloo, kept": 300.0},
    **{"fsdp, Gloo, foreach": 340.0, "fsdp, Gloo, kept, foreach": 324.0},
}
ADDED_MS = {
    **{"fsdp": 2.0, "torch-fsdp2": 60.0, "torch-fsdp2, kept": 50.0},
    **{"torch-fsdp2, fake group": 10.0, "torch-fsdp2, kept, fake group": 8.0},
    **{"fsdp, Gloo, fake group": 2.0, "fsdp, Gloo, kept, fake group": 2.2},
}


def _run_times(step_ms: float) -> RunTimes:
    return RunTimes(**{field.name: step_ms for field in dataclasses.fields(RunTimes)})


def _cost(side: Side, blocks: int, *, fake: bool) -> Overhead:
    assert fake == side.label.endswith("fake group")
    return Overhead(5.0, 5.0 + ADDED_MS[side.label])


def _held(side: Side, workload: str, ranks: int) -> HostMemory:
    """Returns as much as is planned, and rings."""
    numel = sum(p.numel() for p in WORKLOADS[workload](WorkloadOptions()).model().parameters())
    mib = 4 * numel * (ranks if side.strategy == "no-sync" else 1) / 2**20
    return HostMemory(4 * mib + 9 * ranks, 5 * mib, mib, mib, 2 * mib)


def _peak(side: Side, width: int) -> float:
    """16 bytes per parameter, or as much on each rank."""
    copies = 1 if side.strategy in ("fsdp", "zero2", "torch-fsdp2") else 2
    return 16 * 16 * width**2 * copies / 2**20


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_fsdp, "run_fresh", lambda side, *_: _run_times(STEP_MS[side.label]))
    monkeypatch.setattr(bench_fsdp, "measure_engine_cost", _cost)
    monkeypatch.setattr(bench_fsdp, "measure_host_memory", _held)
    monkeypatch.setattr(bench_fsdp, "measure_peak", _peak)


def _contests(part: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(c["ours"], c["theirs"], c["ratio"]["verdict"]) for c in part["contests"]]


@pytest.mark.usefixtures("made_up")
def test_who_is_measured_against_whom(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    assert bench_fsdp.main(["--only", "mlp,engine", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    mlp = found["workloads"]["mlp"]
    assert _contests(mlp) == [
        ("fsdp, foreach", "torch-fsdp2, kept, foreach", "missed"),  # both sides have one AdamW
        ("fsdp", "torch-ddp", "met"),
        ("fsdp", "ddp, shared memory", "met"),
    ]
    lacking = {"torch-ddp + view + batched"} - {side.label for side in TORCH}
    gathered = {side.label for side in bench_fsdp.GATHERED}
    assert mlp["runs"].keys() == STEP_MS.keys() - lacking - gathered
    for name in ("fsdp", "fsdp, foreach", "ddp, shared memory"):
        assert len(mlp["runs"][name]) == 7
    assert len(mlp["runs"]["torch-ddp"]) == 8
    assert _contests(found["engine"]) == [
        ("fsdp", "torch-fsdp2, kept", "met"),
        ("fsdp", "torch-fsdp2, kept, fake group", "met"),
    ]
    assert found["engine"]["contests"][1]["ratio"]["median"] == pytest.approx(0.25)


@pytest.mark.usefixtures("made_up")
def test_parts_are_added_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fsdp.json"
    adding = ["--quick", "--add", "--json", str(file)]
    assert bench_fsdp.main(["--only", "memory", *adding]) == 2
    assert "got --add, expected --json with a file to add to" in capsys.readouterr().err
    assert bench_fsdp.main(["--only", "gpt", "--quick", "--json", str(file)]) == 0
    for part in ("memory", "mlp", "memory-limit"):
        assert bench_fsdp.main(["--only", part, *adding]) == 0
    found = json.loads(file.read_text())
    assert found["workloads"].keys() == {"gpt", "mlp"}
    assert found["commits"].keys() == {"gpt", "memory", "mlp", "memory-limit"}
    assert {"memory", "memory_limit"} <= found.keys()


@pytest.mark.usefixtures("made_up")
def test_pages_show_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    assert "No run is committed yet" in readme_results.written("docs/fsdp.md")
    assert "No run is committed yet" in readme_results.written("docs/strategies.md")
    assert bench_fsdp.main(["--json", str(tmp_path / "fsdp.json")]) == 0
    assert "| 150 (torch-ddp) | 75 (fsdp) | 0.500 (0.500 to 0.500) | 0.58: met |" in (
        readme_results.written("README.md")
    )
    page = readme_results.written("docs/fsdp.md")
    assert "| fsdp, trireme.optim | 70.0 |" in page
    assert "| torch-fsdp2, kept, fake group | 5.00 | 13.00 | 8.00 |" in page
    assert "| mlp | fsdp | 2 | 274 | 17.1 | 320 | 298: met | 256.2 | 256.2 |" in page
    assert "| fsdp | 2880 | 133 | 2025 |" in page
    assert "| torch-ddp + view | 2048 | 67 | 2048 |" in page
    strategies = readme_results.written("docs/strategies.md")
    assert "| torch FSDP2 | 2.40 | 2.40 | 2.40 |" in strategies
    assert "| fully_shard | 0.50 | 0.50 | 0.50 |" in strategies


@pytest.mark.usefixtures("made_up")
def test_where_ours_gathers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    (tmp_path / "fsdp.json").write_text('{"workloads": {}}')
    file = tmp_path / "fsdp_gathered.json"
    assert bench_fsdp.main(["--path", "all-gather", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["workloads"].keys() == bench_fsdp.GATHERED_TARGETS.keys()
    for workload in found["workloads"].values():  # the fastest of each, with the same AdamW
        assert _contests(workload) == [
            ("fsdp, Gloo, kept, foreach", "torch-fsdp2, kept, foreach", "missed")
        ]
    assert [contest[2] for contest in _contests(found["engine"])] == [
        "met",
        "missed",
    ]
    page = readme_results.written("docs/fsdp.md")
    assert (
        "| mlp | 80 | 90 | 360 (torch-fsdp2, kept, foreach) | 324 (fsdp, Gloo, kept, foreach) | "
        "0.900 (0.900 to 0.900) | 0.85: missed |"
    ) in page
    assert "| fsdp, Gloo, fake group | 5.00 | 7.00 | 2.00 |" in page


def test_strategies_are_taken_from_the_first_run_that_has_them() -> None:
    def run(**step_ms: float) -> dict[str, Any]:
        runs = {name.replace("_", "-"): [{"step_ms": ms}] for name, ms in step_ms.items()}
        return {"workloads": {"mlp": {"runs": runs, "torch_best": "torch-ddp"}}}

    zero = run(torch_ddp=200.0, fsdp=150.0, zero2=120.0)
    _, table = readme_fsdp.strategy_tables({"zero": zero, "fsdp": run(torch_ddp=100.0, fsdp=50.0)})
    assert "| fully_shard | 0.50 |" in table
    assert "| ZeRO 2 | 0.60 |" in table
    assert "ZeRO 1 |" not in table


@pytest.mark.parametrize(
    ("limit", "widest", "tried"),
    [(100.0, 10, {10, 12}), (63.0, None, {8, 10}), (1e6, 14, {10, 12, 14})],
    ids=["inside", "none fits", "all fit"],
)
def test_bisection_finds_the_widest(limit: float, widest: int | None, tried: set[int]) -> None:
    found = widest_fitting(lambda width: float(width**2), limit, [8, 10, 12, 14])
    assert found == Fitting(widest, {width: width**2 for width in sorted(tried)})


def test_wrong_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_fsdp.main(["--only", "engines"]) == 2
    assert "Did you mean 'engine'?" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_harness")
def test_units_have_a_cost() -> None:
    """Real ranks: what is sharded still costs more than what is not, also on a busy machine."""
    ours = measure_engine_cost(bench_fsdp.FSDP, 2)
    fake = measure_engine_cost(bench_fsdp.TORCH_ENGINES["fake"][0], 2, fake=True)
    for found in (ours, fake):
        assert 0 < found.bare_ms < found.wrapped_ms


def test_a_watch_sees_the_fullest_moment() -> None:
    with watching([os.getpid()]) as before:
        _until(lambda: before.peak_mib > 0)
    with watching([os.getpid()]) as watch:
        held = torch.ones(64 << 18)
        _until(lambda: watch.peak_mib > before.peak_mib + 60)
        del held


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_host_holds_what_is_told_beforehand() -> None:
    """The whole mlp on two ranks: tensors within 5 %, all of it within the limit of the issue."""
    found = measure_host_memory(bench_fsdp.FSDP, "mlp", 2)
    model = WORKLOADS["mlp"](WorkloadOptions()).model()
    estimate = trireme.estimate_memory(model, "fsdp", 2)
    assert found.model_states * 2**20 == pytest.approx(estimate.host.model_states, rel=0.05)
    assert found.parameters * 2**20 == pytest.approx(estimate.host.parameters, rel=0.01)
    limit = 1.1 * 16 * estimate.numel + (8 << 20) * 2
    assert found.between_steps * 2**20 <= 1.05 * limit


def test_a_peak_is_more_than_the_states_of_the_model() -> None:
    states = 16 * 16 * 768**2 / 2**20  # MiB of 16 layers: 16 bytes per parameter
    # Beside them: activations, batches and pages that the heap keeps, which differ between runs.
    assert states < measure_peak(bench_fsdp.FSDP, 768) < 3 * states
