"""benchmarks/bench_remote.py: made-up times make the tables; each part is measured for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_remote
import readme_results
from measure import remote_batches, remote_calls, remote_modules
from measure.bad_input import BadInput
from measure.remote_batches import BatchCase, measure_batches
from measure.remote_calls import CallsCase, measure_calls
from measure.remote_faults import FAULTS, Lost, RemoteFault, measure_remote_fault
from measure.remote_memory import HeldAfter, MemoryCase, measure_remote_memory
from measure.remote_modules import ModuleCase, measure_module

pytestmark = pytest.mark.usefixtures("forked_measure")

PAGE = "docs/remote.md"
needs_rpc = pytest.mark.skipif(not dist.rpc.is_available(), reason="this torch has no RPC")


def _held(caller: float, callee: float) -> dict[str, dict[str, float]]:
    return {
        "caller": {"rss": caller, "written": caller / 2},
        "callee": {"rss": callee, "written": callee / 2},
    }


def _lost(fault: RemoteFault) -> Lost:
    if not fault.says:
        return Lost(0.5, "", "")
    return Lost(1.5, "DistBackendError", "[remote] p1 (rank 1) has died")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every part has made-up results; returns where they go."""
    calls = {"rpc": [500.0] * 2, "ours": [50.0, 90.0], "send and recv": [13.0] * 2}
    module = {"rpc": [4000.0], "ours": [2000.0], "ours, added up": [1900.0], "local": [600.0]}
    cpp = {"call": [4.0, 4.5, 6.0], "call_async and wait": [5.0] * 3}
    held = HeldAfter(_held(400.0, 300.0), _held(402.0, 300.0), _held(402.0, 330.0))
    for name, measured in {
        "measure_calls": lambda case: {**calls, "copy": [1.0] * 2},
        "measure_module": lambda case: module,
        "measure_batches": lambda case: {"rpc": [400.0], "ours": [100.0]},
        "measure_remote_memory": lambda case: held,
        "measure_remote_fault": _lost,
        "run_program": lambda rounds: json.dumps(cpp),
    }.items():
        monkeypatch.setattr(bench_remote, name, measured)
    monkeypatch.setattr(bench_remote, "require_rpc", lambda: None)
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    return tmp_path / "remote.json"


def test_ratios_and_verdicts(made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--only", "calls,memory", "--json", str(made_up)]
    assert bench_remote.main(options) == 0
    found = json.loads(made_up.read_text())
    verdicts = [size["ratio_to_rpc"]["verdict"] for size in found["calls"].values()]
    assert list(found["calls"]) == ["4 B", "1 MiB", "25 MiB"]
    assert verdicts == ["met"] * 3
    assert [row["verdict"] for row in found["memory"]["rows"]] == ["met"] * 3 + ["missed"]
    assert "0.140 of rpc (0.120 to 0.160), target 0.15" in capsys.readouterr().out
    written = readme_results.written(PAGE)
    assert written.count("\n| --- |") == 2  # parts that were not run have no table


def test_each_part_has_its_table(made_up: Path) -> None:
    assert bench_remote.main(["--json", str(made_up)]) == 0
    page = readme_results.written(PAGE)
    for line in (
        "| 1 MiB | 70.0 | 500.0 | 13.0 | 1.0 | 0.140 (0.120 to 0.160) |",
        "| call | 4.5 (4.0 to 6.0) |",
        "| call_async and wait | 5.0 (5.0 to 5.0) |",
        "| 2000 | 1900 | 4000 | 600 | 0.500 (0.500 to 0.500) |",
        "| 10000 | 2500 | 4.0 (4.0 to 4.0) |",
        "| caller, after calls | 402.0 | 400.0 | +0.50% |",
        "| callee, after dropped forwards | 330.0 | 300.0 | +10.00% |",
        "| callee killed in a forward | the signal | 1.500 | 1.500 | `[remote] p1",
        "| callee stopped in a method | its call | 1.500 | 1.500 | `[remote] p1",
        "| caller killed | the signal | 0.500 | 0.500 |  |",
    ):
        assert line in page


def test_without_rpc_nothing_is_measured_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist.rpc, "is_available", lambda: False)
    assert bench_remote.main(["--only", "calls"]) == 2
    assert "without torch.distributed.rpc" in capsys.readouterr().err


def test_calls_are_whole_batches() -> None:
    from measure.remote_rpc import BATCH

    for calls in (40, 1000):
        case = BatchCase(calls, 1)
        assert case.calls % BATCH == case.in_flight % BATCH == 0


@needs_rpc
def test_calls_are_measured() -> None:
    found = measure_calls(CallsCase(4096, calls=3, rounds=2))
    assert tuple(found) == remote_calls.SIDES
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())


@needs_rpc
def test_modules_are_measured() -> None:
    found = measure_module(ModuleCase(calls=2, rounds=2, width=8, batch=4))
    assert tuple(found) == remote_modules.SIDES
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())


@needs_rpc
def test_batches_are_measured() -> None:
    found = measure_batches(BatchCase(calls=8, rounds=2, callers=2, in_flight=4))
    assert tuple(found) == remote_batches.SIDES
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())


def test_memory_is_measured() -> None:
    case = MemoryCase(calls=20, forwards=5, width=8, batch=4, least=2, settle_s=0.0)
    found = measure_remote_memory(case)
    for held in (found.warm_up, found.calls, found.forwards):
        assert set(held) == {"caller", "callee"}
        assert all(memory["rss"] > memory["written"] > 0 for memory in held.values())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_losses_are_measured(fault: RemoteFault) -> None:
    lost = measure_remote_fault(fault)
    assert 0 <= lost.seconds < 30
    assert bool(lost.text) == bool(lost.raised) == bool(fault.says)


def test_the_program_measures_calls_of_cpp() -> None:
    try:
        found = json.loads(bench_remote.run_program(2, calls=50))
    except BadInput:
        pytest.skip("the C++ benchmarks are not built beside this package")
    assert {*bench_remote.CPP_WITH_TARGET} < found.keys()
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
