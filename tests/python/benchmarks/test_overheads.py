"""benchmarks/bench_overheads.py: what strategies add to small steps, and the share of Python."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_overheads
import readme_results
from measure.engine_cost import measure_engine_cost
from measure.reducer_overhead import Overhead, measure_overhead
from measure.replica_overhead import ReplicaOverhead, measure_replica_overhead
from measure.replica_steps import ReplicaSteps, measure_replica_steps, times_of
from measure.sides import DDP_GLOO, DP, FSDP, ONE_PROCESS, TORCH_DDP, TORCH_VIEW, Side
from workloads import WorkloadOptions

ADDED_MS = {
    **{"ddp, Gloo": 1.0, "torch-ddp": 4.0, "torch-ddp + view": 3.0},
    **{"torch-ddp + view + batched": 3.5},
    **{"fsdp": 2.0, "torch-fsdp2": 60.0, "torch-fsdp2, kept": 50.0},
    **{"torch-fsdp2, fake group": 10.0, "torch-fsdp2, kept, fake group": 8.0},
    **{"fsdp, Gloo, fake group": 2.0, "fsdp, Gloo, kept, fake group": 2.2},
}
OVERHEAD = ReplicaOverhead(5.0, 105.0, 20.0, 220.0, 30.0)
TINY = WorkloadOptions(tiny=True)


def _reducer_cost(side: Side, world: int, blocks: int) -> Overhead:
    assert world == 2
    return Overhead(5.0, 5.0 + ADDED_MS[side.label])


def _unit_cost(side: Side, blocks: int, *, fake: bool) -> Overhead:
    assert fake == side.label.endswith("fake group")
    return Overhead(5.0, 5.0 + ADDED_MS[side.label])


def _steps(side: Side, workload: str, steps: int) -> ReplicaSteps:
    if side.strategy == "single":
        return ReplicaSteps(80.0, 2.0, 0.0, [], [])
    return ReplicaSteps(60.0, 2.0, 4.0, [0] * (5 + steps), [0, 0])


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_overheads, "measure_overhead", _reducer_cost)
    monkeypatch.setattr(bench_overheads, "measure_engine_cost", _unit_cost)
    monkeypatch.setattr(bench_overheads, "measure_replica_steps", _steps)
    monkeypatch.setattr(bench_overheads, "measure_replica_overhead", lambda _: OVERHEAD)


def _contests(part: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(c["ours"], c["theirs"], c["ratio"]["verdict"]) for c in part["contests"]]


@pytest.mark.usefixtures("made_up")
def test_who_is_measured_against_whom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    assert bench_overheads.main(["--json", str(tmp_path / "overheads.json")]) == 0
    found = json.loads((tmp_path / "overheads.json").read_text())
    assert _contests(found["reducer"]) == [("ddp, Gloo", "torch-ddp + view", "met")]
    lacking = {"torch-ddp + view + batched"} - {side.label for side in TORCH_DDP}
    runs = {label: len(runs) for label, runs in found["reducer"]["runs"].items()}
    once = {side.label: 1 for side in TORCH_DDP}
    assert runs == {**once, "ddp, Gloo": 7, "torch-ddp + view": 8}
    assert lacking.isdisjoint(runs)
    assert _contests(found["units"]) == [
        ("fsdp", "torch-fsdp2, kept", "met"),
        ("fsdp", "torch-fsdp2, kept, fake group", "met"),
    ]
    assert found["units"]["contests"][1]["ratio"]["median"] == pytest.approx(0.25)
    assert [contest[2] for contest in _contests(found["gathered-units"])] == ["met", "missed"]
    assert found["replicas"]["ratio"]["median"] == pytest.approx(100 / 150)
    assert found["python"][0]["python_share"] == pytest.approx(0.1)
    page = readme_results.written("docs/benchmarks.md")
    assert "| ddp, Gloo | 5.00 | 6.00 | 1.00 |" in page
    assert "| torch-fsdp2, kept, fake group | 5.00 | 13.00 | 8.00 |" in page
    assert "| fsdp, Gloo, fake group | 5.00 | 7.00 | 2.00 |" in page
    page = readme_results.written("docs/data_parallel.md")
    assert "takes 100 us more through 2 replicas" in page
    assert "| `gpt` | dp | 60.00 | 2.00 | 4.00 | 10.0% | 0 |" in page


@pytest.mark.usefixtures("made_up")
def test_slow_machines_are_judged_by_their_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(OVERHEAD, parallel_forward=185.0, wake_up=60.0)
    monkeypatch.setattr(bench_overheads, "measure_replica_overhead", lambda _: slow)
    ratio = bench_overheads.bench_replicas(bench_overheads.QUICK)["ratio"]
    assert ratio["median"] == pytest.approx(1.0)
    assert ratio["verdict"] == "met"


@pytest.mark.usefixtures("made_up")
def test_copies_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    copying = ReplicaSteps(60.0, 2.0, 4.0, [64, 0], [0, 64])
    monkeypatch.setattr(bench_overheads, "measure_replica_steps", lambda *_: copying)
    assert bench_overheads.bench_python(bench_overheads.QUICK)[0]["most_copied"] == 64


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


@pytest.mark.usefixtures("forked_measure")
def test_replicas_have_operators_and_copy_nothing() -> None:
    """Real steps, of DataParallel and of one process."""
    ours = measure_replica_steps(DP, "narrow", 3, TINY)
    assert ours.copied_bytes == [0] * 8
    assert ours.own_bytes == [0, 0]
    assert 0 < ours.caller_python_ms < ours.step_ms
    assert 0 < ours.replica_python_ms < ours.step_ms
    assert 0 < ours.python_share < 1
    alone = measure_replica_steps(ONE_PROCESS, "narrow", 3, TINY)
    assert (alone.copied_bytes, alone.own_bytes, alone.replica_python_ms) == ([], [], 0.0)
    assert 0 < alone.caller_python_ms < alone.step_ms


@pytest.mark.usefixtures("forked_measure")
def test_replicas_have_a_cost() -> None:
    found = measure_replica_overhead(1)
    assert found.added_to_forward > 0
    assert found.added_to_step > 0
    assert 0 < found.wake_up < 1e5


@pytest.mark.usefixtures("forked_measure")
def test_units_have_a_cost() -> None:
    """Real ranks: what is sharded still costs more than what is not, also on a busy machine."""
    ours = measure_engine_cost(FSDP, 2)
    over_fake_group = (*bench_overheads.TORCH_UNITS["fake"][:1], *bench_overheads.GATHERED_UNITS)
    for found in (ours, *(measure_engine_cost(side, 2, fake=True) for side in over_fake_group)):
        assert 0 < found.bare_ms < found.wrapped_ms


@pytest.mark.parametrize("side", [DDP_GLOO, TORCH_VIEW], ids=["ddp", "torch-ddp"])
def test_reducer_overhead_runs_over_the_fake_group(side: Side) -> None:
    overhead = measure_overhead(side, world=2, blocks=1)
    assert overhead.bare_ms > 0
    assert overhead.wrapped_ms > 0
