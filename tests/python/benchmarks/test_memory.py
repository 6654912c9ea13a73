"""benchmarks/bench_memory.py: what a host holds beside what is planned, and the widest model."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import trireme

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_memory
import readme_results
from measure.host_memory import HostMemory, measure_host_memory
from measure.peak_memory import Fitting, measure_peak, watching, widest_fitting
from measure.sides import FSDP, ZERO_2, Side
from workloads import WORKLOADS, WorkloadOptions


@cache
def _numel(workload: str) -> int:
    with torch.device("meta"):
        model = WORKLOADS[workload](WorkloadOptions()).model()
    return sum(parameter.numel() for parameter in model.parameters())


def _held(side: Side, workload: str, ranks: int) -> HostMemory:
    """Returns as much as is planned, and rings."""
    mib = 4 * _numel(workload) / 2**20
    parameters = ranks * mib if side.strategy in ("no-sync", "torch-ddp", "ddp") else mib
    gradients = ranks * mib if side.strategy == "zero1" else parameters
    moments = 2 * parameters
    held = parameters + gradients + moments
    return HostMemory(held + 9 * ranks, 1.25 * held, parameters, gradients, moments)


def _peak(side: Side, width: int) -> float:
    """16 bytes per parameter, or as much on each rank."""
    copies = 1 if side.strategy in ("fsdp", "zero2", "torch-fsdp2") else 2
    return 16 * 16 * width**2 * copies / 2**20


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_memory, "measure_host_memory", _held)
    monkeypatch.setattr(bench_memory, "measure_peak", _peak)
    monkeypatch.setattr(bench_memory, "measure_peak_of", lambda *_: 400.0)


@pytest.mark.usefixtures("made_up")
def test_memory_has_a_limit_and_an_estimate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "memory.json"
    assert bench_memory.main(["--only", "mlp,gpt", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["workloads"]
    assert found.keys() == {"mlp", "gpt"}
    rows = {(row["side"], row["ranks"]): row for row in found["mlp"]["memory"]}
    assert len(rows) == 2 * len(bench_memory.SIDES)
    fsdp = rows["fsdp", 2]
    assert fsdp["limit"] == pytest.approx(1.1 * 16 * fsdp["numel"] / 2**20 + 16, rel=1e-5)
    assert rows["dp", 2]["limit"] == pytest.approx(0.75 * rows["ddp", 2]["between_steps"])
    assert (rows["dp", 2]["verdict"], fsdp["peak"]) == ("met", 400.0)
    assert "peak" not in rows["fsdp", 4] and "limit" not in rows["ddp", 2]
    assert rows["no sync", 2]["left_by_torch"] > 0
    assert all(row["estimate_agrees"] for row in rows.values())
    capsys.readouterr()

    def more(*case: object) -> HostMemory:
        held = _held(*case)  # type: ignore[arg-type]
        return dataclasses.replace(held, gradients=1.3 * held.gradients)

    monkeypatch.setattr(bench_memory, "measure_host_memory", more)
    assert bench_memory.main(["--only", "mlp", "--quick"]) == 1
    assert "[bench_memory] mlp, fsdp, 2 ranks: estimate_memory said" in capsys.readouterr().out


@pytest.mark.usefixtures("made_up")
def test_pages_show_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    assert bench_memory.main(["--json", str(tmp_path / "memory.json")]) == 0
    page = readme_results.written("docs/benchmarks.md")
    assert "| `mlp` | fsdp | 2 | 274 | 17.1 | 320 | 400 | 256.2 | 256.2 |" in page
    assert "| fsdp | 2880 | 133 | 2025 |" in page
    assert "| torch-ddp + view | 2048 | 67 | 2048 |" in page
    assert "`mlp` at 2 ranks 274 against 274 MiB (after a backward 320 against 320)" in page


@pytest.mark.parametrize(
    ("limit", "widest", "tried"),
    [(100.0, 10, {10, 12}), (63.0, None, {8, 10}), (1e6, 14, {10, 12, 14})],
    ids=["inside", "none fits", "all fit"],
)
def test_bisection_finds_the_widest(limit: float, widest: int | None, tried: set[int]) -> None:
    found = widest_fitting(lambda width: float(width**2), limit, [8, 10, 12, 14])
    assert found == Fitting(widest, {width: width**2 for width in sorted(tried)})


def test_wrong_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_memory.main(["--only", "limits"]) == 2
    assert "Did you mean 'limit'?" in capsys.readouterr().err


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


@pytest.mark.parametrize(("side", "planned"), [(FSDP, "fsdp"), (ZERO_2, "zero2")])
def test_a_host_holds_what_is_told_beforehand(side: Side, planned: str) -> None:
    """The whole mlp on two ranks: tensors within 5 %, all of it within its limit."""
    found = measure_host_memory(side, "mlp", 2)
    model = WORKLOADS["mlp"](WorkloadOptions()).model()
    estimate = trireme.estimate_memory(model, planned, 2)
    assert found.model_states * 2**20 == pytest.approx(estimate.host.model_states, rel=0.05)
    assert found.parameters * 2**20 == pytest.approx(estimate.host.parameters, rel=0.01)
    limit = 1.1 * 16 * estimate.numel + (8 << 20) * 2
    assert found.between_steps * 2**20 <= 1.05 * limit


def test_a_peak_is_more_than_the_states_of_the_model() -> None:
    states = 16 * 16 * 768**2 / 2**20  # MiB of 16 layers: 16 bytes per parameter
    # Beside them: activations, batches and pages that the heap keeps, which differ between runs.
    assert states < measure_peak(FSDP, 768) < 3 * states
