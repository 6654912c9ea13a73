"""benchmarks/bench_pipeline.py: what is compared, verdicts, pages; small runs for real."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_pipeline
import readme_results
from measure.pipeline_runs import (
    StepTimes,
    job_of,
    measure_messages,
    measure_steps,
    measure_threads,
)
from measure.stages import micro_batches


def made_up_steps(workload: str, names: list[str], ranks: int, *_: object) -> StepTimes:
    times = {"1 thread": [100.0, 100.0], "2 threads": [60.0, 60.0]}
    for name in names:
        times |= {f"ours {name}": [110.0, 112.0], f"torch {name}": [200.0, 140.0]}
    bubbles = dict.fromkeys(names, (0.2, 0.18 if workload == "mlp" else 0.1))
    return StepTimes(times, 32, bubbles, dict.fromkeys(names, [2] * ranks))


def made_up_threads(workload: str, *_: object) -> dict[str, list[float]]:
    others = {"torchgpipe, 1 thread": [200.0, 200.0], "torchgpipe, 2 threads": [160.0, 200.0]}
    alone = {"1 thread": [100.0, 100.0], "2 threads": [60.0, 60.0]}
    return {"ranks": [80.0, 80.0], "step": [80.0, 88.0], "pass": [120.0, 120.0], **others, **alone}


def test_what_is_compared_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_pipeline, "measure_steps", made_up_steps)
    monkeypatch.setattr(bench_pipeline, "measure_threads", made_up_threads)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find("json" if name == "torchgpipe" else name)
    )
    messages = {"ours": [40.0], "torch": [400.0], "copy": [20.0]}
    monkeypatch.setattr(bench_pipeline, "measure_messages", lambda *_: messages)
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    file = tmp_path / "pipeline.json"
    assert bench_pipeline.main(["--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["engine"]["share"] == pytest.approx(11 / 70)
    assert found["engine"]["verdict"] == "met"
    assert {row["ratio"]["verdict"] for row in found["small"]} == {"missed"}
    rows = {(row["workload"], row["schedule"]): row for row in found["steps"]["rows"]}
    assert len(rows) == 7
    assert rows["gpt", "1f1b"]["ratio"]["median"] == pytest.approx((0.55 + 0.8) / 2)
    assert rows["mlp", "1f1b"]["ratio"]["verdict"] == "met"
    assert [split["workload"] for split in found["steps"]["splits"]] == ["mlp", "gpt"]
    verdicts = {bubble["workload"]: bubble["verdict"] for bubble in found["steps"]["bubbles"]}
    assert verdicts == {"mlp": "met", "gpt-small-batch": "missed", "gpt": "missed"}
    assert found["threads"]["engine"]["share"] == pytest.approx(20 / 80)
    threads = {row["workload"]: row for row in found["threads"]["rows"]}
    assert threads["gpt"]["step"]["median"] == pytest.approx((80 / 200 + 88 / 200) / 2)
    assert threads["gpt"]["fastest"]["median"] == pytest.approx((120 / 160 + 120 / 200) / 2)
    assert threads["gpt"]["pass"]["verdict"] == "met"
    assert threads["gpt"]["ranks"]["verdict"] == "met"
    page = readme_results.written("docs/pipeline.md")
    assert "| `mlp` | `1f1b` | 111.0 | 170.0 | 0.675 (0.550 to 0.800) | 100.0 / 60.0 |" in page
    assert "| 1024 | 40.0 | 400.0 | 0.100 (0.100 to 0.100) | 20.0 | 2.00 |" in page
    assert "| 64 | 40.0 | 400.0 | 0.100 (0.100 to 0.100) | 20.0 |  |" in page
    assert "trireme / torch: 0.157." in page
    assert "| `gpt` | 84.0 | 120.0 | 200.0 / 180.0 | 80.0 | 100.0 / 60.0 |" in page
    assert "| `gpt` | 0.420 (" in page
    assert "`pipe(x)` / torchgpipe: 0.250." in page


def test_without_torchgpipe_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench_pipeline.main(["--only", "threads"]) == 2
    assert "pip install --no-deps torchgpipe" in capsys.readouterr().err


def test_models_are_cut_between_blocks() -> None:
    job = job_of("gpt-small-batch", tiny=True)
    assert len(job.layers.layers) == 4 and job.layers.balance(2) == [2, 2]
    assert job.inputs.shape[0] == 4 == job.chunks
    whole = job_of("mlp", tiny=False).layers
    assert whole.balance(4) == [4, 4, 4, 4] and whole.balance(3) == [6, 5, 5]
    assert job_of("gpt", tiny=False).layers.balance(3) == [4, 3, 3]


def test_micro_batches_are_equal() -> None:
    counts = [micro_batches(batch, 2) for batch in (16, 32, 4, 6, 7, 22)]
    assert counts == [8, 8, 4, 6, 7, 2]


@pytest.mark.usefixtures("forked_measure")
@pytest.mark.parametrize("workload", ["linear", "mlp", "gpt-small-batch", "gpt"])
def test_sides_are_timed_and_have_equal_losses(workload: str) -> None:
    names = ["1f1b", "interleaved-1f1b", "zb-v"] if workload == "linear" else ["1f1b"]
    found = measure_steps(workload, names, 2, 2, tiny=True)
    assert len(found.times) == 2 * len(names) + 2
    assert all(len(taken) == 2 and min(taken) >= 0 for taken in found.times.values())
    assert found.live["1f1b"] == [2, 1]
    assert all(0 <= share < 1 for pair in found.bubbles.values() for share in pair)


@pytest.mark.usefixtures("forked_measure")
def test_threads_are_timed_and_have_equal_losses() -> None:
    pytest.importorskip("torchgpipe")
    found = measure_threads("gpt", 2, tiny=True)
    assert set(found) == set(made_up_threads("gpt"))
    assert all(len(taken) == 2 and min(taken) > 0 for taken in found.values())


@pytest.mark.usefixtures("forked_measure")
def test_messages_are_timed() -> None:
    found = measure_messages(64 << 10, 2)
    assert {side: len(taken) for side, taken in found.items()} == dict.fromkeys(found, 2)
    assert set(found) == {"ours", "torch", "copy"} and min(found["ours"]) > 0
