"""benchmarks/bench_dp.py: who is measured against whom, the share of Python, what is copied."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_dp
import readme_results
from harness.fresh_run import RunTimes
from harness.host_memory import HostMemory
from harness.pairs import TORCH, Side
from harness.replica_overhead import ReplicaOverhead, measure_replica_overhead
from harness.replica_steps import ReplicaSteps, measure_replica_steps, times_of
from workloads import WorkloadOptions

STEP_MS = {
    **{"1 process": 80.0, "2 ranks, no sync": 90.0, "dp": 58.0, "ddp, shared memory": 60.0},
    **{"torch-ddp": 150.0, "torch-ddp + view": 160.0, "torch-ddp + view + batched": 170.0},
}
OVERHEAD = ReplicaOverhead(5.0, 105.0, 20.0, 220.0, 30.0)
TINY = WorkloadOptions(tiny=True)


def _run_times(step_ms: float) -> RunTimes:
    return RunTimes(**{field.name: step_ms for field in dataclasses.fields(RunTimes)})


def _held(side: Side, workload: str, ranks: int) -> HostMemory:
    assert ranks == 2
    copies = 2 if side.strategy == "ddp" else 1
    return HostMemory(200.0 * copies, 280.0 * copies, 0.0, 0.0, 0.0)


def _steps(side: Side, workload: str, steps: int) -> ReplicaSteps:
    if side.strategy == "single":
        return ReplicaSteps(80.0, 2.0, 0.0, [], [])
    return ReplicaSteps(60.0, 2.0, 4.0, [0] * (5 + steps), [0, 0])


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_dp, "run_fresh", lambda side, *_: _run_times(STEP_MS[side.label]))
    monkeypatch.setattr(bench_dp, "measure_host_memory", _held)
    peaks = {"dp": 320.0, "ddp": 400.0, "single": 300.0}
    monkeypatch.setattr(bench_dp, "measure_peak_of", lambda side, _: peaks[side.strategy])
    monkeypatch.setattr(bench_dp, "measure_replica_steps", _steps)
    monkeypatch.setattr(bench_dp, "measure_replica_overhead", lambda _: OVERHEAD)


def _contests(part: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(c["ours"], c["theirs"], c["ratio"]["verdict"]) for c in part["contests"]]


@pytest.mark.usefixtures("made_up")
def test_who_is_measured_against_whom(tmp_path: Path) -> None:
    file = tmp_path / "dp.json"
    assert bench_dp.main(["--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert _contests(found["workloads"]["mlp"]) == [("dp", "ddp, shared memory", "met")]
    assert _contests(found["workloads"]["gpt"]) == [("dp", "ddp, shared memory", "met")]
    assert _contests(found["workloads"]["narrow"]) == [("dp", "1 process", "met")]
    assert found["workloads"]["narrow"]["contests"][0]["ratio"]["target"] == 0.75
    lacking = {"torch-ddp + view + batched"} - {side.label for side in TORCH}
    for name, opponent in (("mlp", "ddp, shared memory"), ("narrow", "1 process")):
        runs = found["workloads"][name]["runs"]
        assert runs.keys() == STEP_MS.keys() - lacking
        assert {label for label, taken in runs.items() if len(taken) == 7} == {"dp", opponent}
    kinds = {one["kind"]: one["ratio"]["verdict"] for one in found["memory_contests"]}
    assert kinds == {"between_steps": "met", "after_backward": "met", "peak": "missed"}
    assert found["overhead"]["ratio"]["median"] == pytest.approx(100 / 150)
    assert found["replicate"]["verdict"] == "met"
    assert found["python"][0]["python_share"] == pytest.approx(0.1)


@pytest.mark.usefixtures("made_up")
def test_slow_machines_are_judged_by_their_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(OVERHEAD, parallel_forward=185.0, wake_up=60.0)
    monkeypatch.setattr(bench_dp, "measure_replica_overhead", lambda _: slow)
    ratio = bench_dp.bench_overhead(bench_dp.QUICK)["ratio"]
    assert ratio["median"] == pytest.approx(1.0)
    assert ratio["verdict"] == "met"


@pytest.mark.usefixtures("made_up")
def test_copies_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    copying = ReplicaSteps(60.0, 2.0, 4.0, [64, 0], [0, 64])
    monkeypatch.setattr(bench_dp, "measure_replica_steps", lambda *_: copying)
    found = bench_dp.bench_replicate(bench_dp.QUICK)
    assert found["copied_bytes"]["mlp"] == 64
    assert found["verdict"] == "missed"


@pytest.mark.usefixtures("made_up")
def test_parts_are_added_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dp.json"
    adding = ["--quick", "--add", "--json", str(file)]
    assert bench_dp.main(["--only", "memory", *adding]) == 2
    assert "[bench_dp] got --add, expected --json" in capsys.readouterr().err
    assert bench_dp.main(["--only", "narrow", "--quick", "--json", str(file)]) == 0
    assert bench_dp.main(["--only", "mlp,overhead", *adding]) == 0
    found = json.loads(file.read_text())
    assert found["workloads"].keys() == {"narrow", "mlp"}
    assert found["commits"].keys() == {"narrow", "mlp", "overhead"}
    assert bench_dp.main(["--only", "narow"]) == 2
    assert "Did you mean 'narrow'?" in capsys.readouterr().err


@pytest.mark.usefixtures("made_up")
def test_pages_show_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    assert "No run is committed yet" in readme_results.written("docs/data_parallel.md")
    assert bench_dp.main(["--json", str(tmp_path / "dp.json")]) == 0
    line = "| narrow | 80 | 60 | 58 | 1 process | 0.725 (0.725 to 0.725) | 0.75: met |"
    assert line in readme_results.written("README.md")
    page = readme_results.written("docs/data_parallel.md")
    assert line in page
    assert "| mlp | dp | 200; of DDP 0.500 (0.500 to 0.500), 0.75: met | 280; of DDP" in page
    assert "| 320; of DDP 0.800 (0.800 to 0.800), 0.75: missed |" in page
    assert "| mlp | ddp, shared memory | 400 | 560 | 400 |" in page
    assert "takes 100 us more through 2 replicas" in page
    assert "Bytes copied per step to keep replicas up to date: 0, target 0: met." in page
    assert "| gpt | dp | 60.00 | 2.00 | 4.00 | 10.0% |" in page
    strategies = readme_results.written("docs/strategies.md")
    assert "|  | mlp | gpt | narrow |" in strategies
    assert "| DataParallel | 0.39 | 0.39 | 0.39 |" in strategies
    assert "| dp | 12.5 | 14.6 |" in strategies


def _event(name: str, thread: int, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, thread=thread, time_range=SimpleNamespace(start=start, end=end)
    )


def test_time_in_operators_counts_once_and_only_inside_of_steps() -> None:
    node = "autograd::engine::evaluate_function: X"
    found = times_of(
        [
            _event("bench::step", 1, 1000, 9000),
            _event("aten::linear", 1, 2000, 3000),
            _event("aten::addmm", 1, 2000, 2500),
            _event(node, 1, 4000, 6000),
            _event("aten::mm", 1, 4500, 5000),
            _event("aten::index", 1, 9500, 9900),
            _event("Optimizer.step#AdamW.step", 1, 7000, 8000),
            _event("aten::linear", 2, 2000, 2800),
            _event(node, 2, 4500, 5500),
            _event("aten::mm", 2, 4600, 5000),
            _event("aten::linear", 3, 2200, 2700),
        ]
    )
    assert (found.step_ms, found.caller_ms, found.others_ms) == pytest.approx((8.0, 3.0, 1.3))


@pytest.mark.usefixtures("forked_harness")
def test_replicas_have_operators_and_copy_nothing() -> None:
    """Real steps, of DataParallel and of one process."""
    ours = measure_replica_steps(bench_dp.DP, "narrow", 3, TINY)
    assert ours.copied_bytes == [0] * 8
    assert ours.own_bytes == [0, 0]
    assert 0 < ours.caller_python_ms < ours.step_ms
    assert 0 < ours.replica_python_ms < ours.step_ms
    assert 0 < ours.python_share < 1
    alone = measure_replica_steps(bench_dp.ONE_PROCESS, "narrow", 3, TINY)
    assert (alone.copied_bytes, alone.own_bytes, alone.replica_python_ms) == ([], [], 0.0)
    assert 0 < alone.caller_python_ms < alone.step_ms


@pytest.mark.usefixtures("forked_harness")
def test_replicas_have_a_cost() -> None:
    found = measure_replica_overhead(1)
    assert found.added_to_forward > 0
    assert found.added_to_step > 0
    assert 0 < found.wake_up < 1e5
