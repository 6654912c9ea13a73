"""benchmarks/bench_activation.py: what is compared, verdicts, pages; small runs for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_activation
import readme_results
from measure import activation_runs
from measure.activation_runs import (
    CallCost,
    Job,
    OffloadTimes,
    PeakMemory,
    measure_calls,
    measure_offload,
    measure_peak,
    measure_steps,
    python_calls,
)
from measure.bad_input import BadInput

STEPS = {"plain": [100.0, 110.0], "ours": [118.0, 120.0], "torch": [120.0, 120.0]}
CPP = [
    {"model": "mlp", "once": [10.0], "twice": [14.0], "checkpointed": [14.0]},
    {"model": "gpt", "once": [100.0], "twice": [140.0], "checkpointed": [150.0]},
]
OFFLOAD = OffloadTimes(
    steps={"plain": [100.0], "memory": [101.0], "folder": [150.0]},
    bytes={"memory": 0, "folder": 180 << 20},
    copies={"memory": [0.0], "folder": [120.0]},
)
PEAKS = {"never": (600.0, 580.0), "sqrt": (230.0, 200.0), "auto": (300.0, 290.0)}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CallCost(10.0, 50.0, 90.0, 310.0, 4, 107)
    monkeypatch.setattr(bench_activation, "measure_calls", lambda _: call)
    monkeypatch.setattr(bench_activation, "measure_steps", lambda *_: STEPS)
    monkeypatch.setattr(bench_activation, "measure_offload", lambda *_: OFFLOAD)
    monkeypatch.setattr(
        bench_activation, "measure_peak", lambda checkpoint, _: PeakMemory(*PEAKS[checkpoint])
    )
    monkeypatch.setattr(bench_activation, "run_program", lambda *_: "\n".join(map(json.dumps, CPP)))


@pytest.mark.usefixtures("made_up")
def test_what_is_compared_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    file = tmp_path / "activation.json"
    assert bench_activation.main(["--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["call"]["ratio"]["median"] == pytest.approx(30 / 250, rel=1e-4)
    assert len(found["steps"]["ratio"]["ratios"]) == 6  # both rounds of three processes
    assert [row["ratio"]["verdict"] for row in found["cpp"]] == ["met", "missed"]
    assert [row["ratio"]["median"] for row in found["offload"]] == [1.01, 1.25]
    assert [row["verdict"] for row in found["peak"]] == ["met", "missed", "met"]
    page = readme_results.written("docs/activation_memory.md")
    assert "| sqrt | 230 | 200 | 1.15 |" in page
    assert "| trireme | 119 | 1.133 |" in page
    assert "trireme / torch: 0.992 (0.983 to 1.000)." in page
    assert "| `gpt` | 100.0 | 140.0 | 150.0 | 1.071 (1.071 to 1.071) |" in page
    assert "| torch | 250.0 | 107 |" in page
    assert "| a folder | 180 | 150 | 100 | 120 | 1.250 (1.250 to 1.250) |" in page


def test_calls_of_python_are_counted() -> None:
    def inner() -> None:
        pass

    def outer() -> None:
        inner()
        len([])

    assert python_calls(outer) == 2


@pytest.mark.usefixtures("forked_measure")
def test_a_small_checkpoint_has_a_cost() -> None:
    """On a busy machine, too, ours has fewer calls, and steps take more than forwards."""
    found = measure_calls(1)
    assert found.plain > found.forward > 0
    assert 0 < found.python_calls < found.torchs_python_calls / 5


@pytest.mark.usefixtures("forked_measure")
def test_steps_of_all_sides_are_timed(tmp_path: Path) -> None:
    steps = measure_steps("gpt", 2, tiny=True)
    assert {name: len(taken) for name, taken in steps.items()} == dict.fromkeys(STEPS, 2)
    offload = measure_offload(tmp_path, 2, tiny=True)
    assert offload.bytes["memory"] == 0 < offload.bytes["folder"]
    assert len(offload.copies["folder"]) == len(offload.steps["folder"]) == 2
    assert min(offload.copies["folder"]) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked_measure")
@pytest.mark.parametrize("checkpoint", bench_activation.PEAKS)
def test_peaks_are_planned(checkpoint: str) -> None:
    """Sizes for tests: what is planned counts, the process has pages of its own beside it."""
    found = measure_peak(checkpoint, tiny=True)
    never = measure_peak("never", tiny=True).planned
    if checkpoint == "auto":
        assert found.planned <= never / 2
    assert found.planned == never if checkpoint == "never" else found.planned < never
    assert found.measured >= 0


def test_blocks_are_called_as_told() -> None:
    job = Job("mlp", tiny=True)
    plain = _gradients(job)
    called: list[nn.Module] = []

    def call(block: activation_runs.Call, x: torch.Tensor) -> torch.Tensor:
        called.append(block)
        return block(x)

    job.use(call)
    for one, other in zip(_gradients(job), plain, strict=True):
        assert torch.equal(one, other)
    assert len(called) == len(job.blocks) == 2


def _gradients(job: Job) -> list[torch.Tensor]:
    job.step()
    return [p.grad.clone() for p in job.model.parameters() if p.grad is not None]


def test_the_program_of_cpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trireme.__file__", str(tmp_path / "python" / "trireme" / "__init__.py"))
        with pytest.raises(BadInput, match="Build the target checkpoint"):
            bench_activation.run_program(1, True)
    try:
        lines = bench_activation.run_program(2, True).splitlines()
    except BadInput as error:
        pytest.skip(str(error))
    runs = [json.loads(line) for line in lines]
    assert [run.pop("model") for run in runs] == ["mlp", "gpt"]
    for run in runs:
        assert {name: len(taken) for name, taken in run.items()} == {
            "once": 2,
            "twice": 2,
            "checkpointed": 2,
        }
