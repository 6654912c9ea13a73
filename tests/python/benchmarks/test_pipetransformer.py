"""benchmarks/bench_pipetransformer.py: small runs for real, and what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_pipetransformer

SECONDS = {
    "ddp": [2.0, 2.0, 2.0],
    "ddp+freeze": [2.0, 1.5, 1.0],
    "ddp+freeze+cache": [2.0, 1.4, 0.4],
    "pipeline": [4.0, 4.0, 4.0],
    "pipeline+freeze": [4.0, 3.0, 2.0],
    "pipeline+freeze+plan": [4.0, 2.5, 1.5],
    "all": [4.0, 2.4, 0.8],
}


def made_up(what: str, **config: Any) -> list[dict[str, Any]]:
    """Two ranks, of which the second one is slower."""
    if what == "epochs":
        seconds = SECONDS[config["side"]]
        told = {"loss": [3.0, 2.0, 1.0], "hits": [0, 4, 8], "frozen": [0, 3, 5]}
        return [{"seconds": [s / 2 for s in seconds], **told}, {"seconds": seconds, **told}]
    if what == "off":
        return [{"plain": [10.0, 10.0], "freeze": [10.0, 10.4]}] * 2
    if what == "change":
        return [{"usual": [10.0, 10.0], "first": [11.0, 13.0]}] * 2
    if what == "transform":
        quick = {"bytes": 1 << 20, "transform_ms": 60.0, "copy_ms": 8.0}
        return [quick, {**quick, "transform_ms": 62.0}]
    batches = [{"rows": rows, "read_us": 30.0, "copy_us": 20.0} for rows in (4, 32)]
    size = {"bytes": 1 << 16, "batches": batches, "pss": 52, "entries": 100}
    return [{"sizes": [size] * 3}] * 2


def test_what_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_pipetransformer, "measure_freeze", made_up)
    monkeypatch.setattr(bench_pipetransformer, "measure_elastic", made_up)
    file = tmp_path / "pipetransformer.json"
    assert bench_pipetransformer.main(["--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert results["epochs"]["last"]["median"] == pytest.approx(0.4)
    assert results["epochs"]["whole"]["median"] == pytest.approx(3.8 / 4.5)
    assert [row["hits"][-1] for row in results["epochs"]["rows"]] == [16] * 7
    assert results["epochs"]["elastic"]["median"] == pytest.approx(7.2 / 12)
    assert results["transform"]["ratio"]["median"] == pytest.approx(1.5)
    assert results["off"]["ratio"]["median"] == pytest.approx(1.02)
    assert results["change"][0]["ratio"]["median"] == pytest.approx(1.2)
    reads = results["reads"]
    assert [row["rows"] for row in reads["rows"]] == [4, 32] * 3
    assert reads["rows"][0]["ratio"]["median"] == pytest.approx(1.5)
    assert reads["memory"][0]["ratio"]["median"] == pytest.approx(1.04)


@pytest.mark.usefixtures("forked_measure")
def test_small_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_pipetransformer, "STRATEGIES", ("zero2",))
    file = tmp_path / "pipetransformer.json"
    command = ["--quick", "--only", "epochs,transform,off,change,reads", "--json", str(file)]
    assert bench_pipetransformer.main(command) == 0
    results = json.loads(file.read_text())
    plain, frozen, cached, fixed, *elastic = results["epochs"]["rows"]
    assert fixed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert all(row["loss"] == pytest.approx(frozen["loss"], rel=1e-5) for row in elastic)
    assert [row["frozen"] for row in elastic] == [frozen["frozen"]] * 3
    assert fixed["ranks"] == elastic[0]["ranks"] == [2] * 4 and elastic[2]["hits"][-1] > 0
    assert results["transform"]["transform_ms"] > 0 < results["transform"]["mib"]
    assert plain["frozen"] == [0] * 4 and frozen["frozen"] == cached["frozen"] == [0, 2, 3, 3]
    assert frozen["loss"] == pytest.approx(cached["loss"], rel=1e-5)
    assert cached["hits"][-1] > 0 == frozen["hits"][-1]
    assert [row["strategy"] for row in results["change"]] == ["zero2"]
    (memory,) = results["reads"]["memory"]
    assert memory["ratio"]["median"] < 1.1
    assert all(row["read_us"] > 0 < row["copy_us"] for row in results["reads"]["rows"])
