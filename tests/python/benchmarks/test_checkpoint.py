"""benchmarks/bench_checkpoint.py: speeds beside a copy's, verdicts, pages; a small run for real."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_checkpoint
import readme_results
from bench_checkpoint import Checkpoints, Effort, Side
from measure import checkpoint_runs
from measure.checkpoint_runs import (
    CheckpointRun,
    Loaded,
    Model,
    Saved,
    check_sums,
    load_peak_mib,
    sum_of,
    train_a_step,
)
from measure.ranks import RankFailed
from measure.save_runs import (
    SaveCost,
    SaveRun,
    cost_of_save,
    hashed_share,
    load_seconds,
    peaks_mib,
    saving_ranks,
)
from measure.strategies import OptimizerSpec, Parallel, build_plain

TINY = Effort(2, 1, Model(width=64, units=3))
SECONDS = {"fsdp": 0.5, "zero2": 1.0, "ddp": 2.5, "single": 0.8, "torch-fsdp2": 4.0}


_SAVE = SaveCost(0.2, 1.0, 2.0, 0.01, 0.21, 0.4, 9.0)


def _load(run: CheckpointRun, _: Saved) -> Loaded:
    reading_s = 3.0 if run.library == "torch" else SECONDS[run.strategy]
    return Loaded(SECONDS[run.strategy], reading_s, 100.0)


def _peak(run: CheckpointRun, _: Saved) -> float:
    return run.model.unit_mib * (0.5 if run.library == "trireme" else 16.0)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_checkpoint, "save_with", lambda _: Saved(1.0, 0.0))
    monkeypatch.setattr(bench_checkpoint, "load_with", _load)
    monkeypatch.setattr(bench_checkpoint, "load_peak_mib", _peak)
    monkeypatch.setattr(bench_checkpoint, "saving_ranks", lambda *_: nullcontext())
    monkeypatch.setattr(bench_checkpoint, "cost_of_save", lambda _: _SAVE)
    monkeypatch.setattr(bench_checkpoint, "load_seconds", lambda _: [1.1, 1.0])
    monkeypatch.setattr(bench_checkpoint, "hashed_share", lambda *_: 1.01)
    monkeypatch.setattr(bench_checkpoint, "peaks_mib", lambda _: [190.0, 100.0])
    monkeypatch.setattr(bench_checkpoint, "cores", lambda: 2)
    monkeypatch.setattr(bench_checkpoint, "_drop_cache", lambda _: None)
    monkeypatch.setattr(bench_checkpoint, "DROP_CACHES", Path(__file__))
    monkeypatch.setattr(Checkpoints, "copy_s", lambda _: 1.0)
    monkeypatch.setattr(Checkpoints, "mib", lambda _: 1728.0)


def _verdicts(part: dict[str, Any]) -> list[str]:
    return [side["ratio"]["verdict"] for side in part["sides"] if "ratio" in side]


@pytest.mark.usefixtures("made_up")
def test_speeds_and_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    assert "No run is committed yet" in readme_results.written("docs/checkpoint.md")
    file = tmp_path / "checkpoint.json"
    assert bench_checkpoint.main(["--json", str(file)]) == 0
    found = json.loads(file.read_text())
    for part, rounds in (("warm", 7), ("cold", 5)):
        assert len(found[part]["copy_s"]) == rounds
        # fully_shard on 2 ranks twice, ZeRO, DDP, 1 process: 4 ranks are more than there are cores.
        assert _verdicts(found[part]) == ["met", "met", "met", "missed", "met"]
    assert {row.get("verdict") for row in found["memory"]} == {"met", None}
    goals = {
        (workload, goal["what"]): goal["verdict"]
        for workload, part in found["saves"].items()
        for goal in part["goals"]
        if goal["side"] == "ddp"
    }
    assert goals["gpt", "stall, ms"] == goals["mlp", "stall / a copy of the part"] == "met"
    assert goals["gpt", "memory beyond training, MiB"] == "missed"
    hashed = "bytes hashed by 4 ranks in a load / bytes of the files"
    assert goals["mlp", hashed].startswith("met within noise")
    page = readme_results.written("docs/checkpoint.md")
    assert "1.7 GiB: 16 units of 36 MiB" in page
    assert "| a copy of the files |  |  | 1.00 | 1.81 |  |" in page
    assert "| ZeRO 2 | 4 | 2 | 1.00 | 1.81 | 100% |" in page
    assert "| fully_shard | 2 | 4 | 0.50 | 3.62 | 200% |" in page
    assert "| torch's fully_shard | 2 | 2 | 4.00 | 0.45 | 25% |" in page
    assert "| DDP | 4 | 2 | 18.0 | 0.50 |" in page
    assert "| `mlp` | `torch-ddp` | 0.20 | 1.0 | 2.0 | 10 | 0.21 | 0.40 |" in page


@pytest.mark.usefixtures("made_up")
def test_cold_needs_the_right_to_drop_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_checkpoint, "DROP_CACHES", tmp_path / "none")
    file = tmp_path / "checkpoint.json"
    assert bench_checkpoint.main(["--only", "cold,memory", "--quick", "--json", str(file)]) == 0
    assert "cold: left out" in capsys.readouterr().out
    assert "cold" not in json.loads(file.read_text())
    assert bench_checkpoint.main(["--only", "cool"]) == 2


@pytest.mark.usefixtures("forked_measure")
def test_small_saves_beside_steps(tmp_path: Path) -> None:
    run = SaveRun("trireme", "ddp", "mlp", 2, 1, str(tmp_path), tiny=True)
    with saving_ranks(run, tmp_path) as group:
        cost = cost_of_save(group)
        assert 0 < cost.stall_ms < 1e4 and cost.beside_s > 0 and cost.copy_ms > 0
        assert all(seconds > 0 for seconds in load_seconds(group))
        assert hashed_share(group, tmp_path / "now") == pytest.approx(1, abs=0.01)
        assert all(peak >= 0 for peak in peaks_mib(group))  # seen every 20 ms


@pytest.mark.usefixtures("forked_measure")
def test_a_small_run(tmp_path: Path) -> None:
    """Saved by 2 ranks, loaded by one process."""
    checkpoints = Checkpoints(tmp_path, TINY.model)
    side = Side("1 process", "trireme", "single", 1, 2)
    checkpoints.save([side])
    run, saved = checkpoints.run_of(side), checkpoints.expected(side)
    assert load_peak_mib(run, saved) < 50
    assert checkpoints.copy_s() > 0
    assert checkpoints.mib() > 3 * TINY.model.units * TINY.model.unit_mib


def test_what_was_not_saved_is_noticed() -> None:
    check_sums([3.0, 3.0 + 1e-12], Saved(1.0, 3.0))
    for wrong in (3.1, float("nan")):
        with pytest.raises(RankFailed, match=r"expected 3.0 \(rank 1 of 2\)"):
            check_sums([3.0, wrong], Saved(1.0, 3.0))


@pytest.mark.parametrize("library", checkpoint_runs.LIBRARIES)
def test_libraries_load_what_they_have_saved(library: str, tmp_path: Path) -> None:
    def build() -> Parallel:
        return build_plain(TINY.model.build(), OptimizerSpec(), {})

    trained, fresh = build(), build()
    train_a_step(trained, TINY.model.width)
    used = checkpoint_runs.LIBRARIES[library]
    used.save(str(tmp_path / "checkpoint"), trained)
    assert used.load(str(tmp_path / "checkpoint"), fresh) > 0
    assert sum_of(fresh) == sum_of(trained) != sum_of(build())
