"""benchmarks/bench_horovod.py: Horovod's API beside what it stands on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_horovod
from measure.horovod_rounds import HorovodCase, measure_horovod

US = {"bare": 1000.0, "ddp": 1100.0, "horovod": 1120.0, "all_reduce": 1110.0}
US |= {"same": 100.0, "opposite": 300.0}
SIDES = {
    "steps": ("ddp", "horovod"),
    "many": ("bare", "ddp", "horovod"),
    "allreduce": ("all_reduce", "horovod"),
    "names": ("same", "opposite"),
}


def _made_up(case: HorovodCase) -> dict[str, list[float]]:
    return {name: [US[name]] * case.rounds for name in SIDES[case.kind]}


def test_what_is_measured_against_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_horovod, "measure_horovod", _made_up)
    path = tmp_path / "horovod.json"
    assert bench_horovod.main(["--json", str(path)]) == 0
    found = json.loads(path.read_text())

    def judged(part: dict[str, Any]) -> tuple[float, str]:
        return round(part["ratio"]["median"], 3), part["ratio"]["verdict"]

    assert judged(found["steps"]["mlp"]) == (1.018, "met")
    assert judged(found["many"]) == (1.2, "met")
    assert judged(found["allreduce"]["4"]) == (0.991, "met")  # 20 us more are allowed
    assert judged(found["allreduce"][str(25 << 20)]) == (1.009, "met")
    assert judged(found["names"]) == (3.0, "missed")
    assert len(found["names"]["times_us"]["same"]) == 15


@pytest.mark.usefixtures("forked_measure")
@pytest.mark.parametrize(
    ("kind", "what"), [("steps", "mlp"), ("many", ""), ("allreduce", "1024"), ("names", "")]
)
def test_ranks_measure(kind: str, what: str) -> None:
    """Real ranks."""
    times = measure_horovod(HorovodCase(kind, what, rounds=1, calls=1, tiny=True))
    assert set(times) == set(SIDES[kind])
    assert all(us > 0 for found in times.values() for us in found)
