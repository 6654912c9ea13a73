"""The table of goals has every target of the results, and says why one is missed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import readme_goals
import readme_results
from readme_goals import goals, lacking
from readme_rows import added_by_averaging, added_by_distance, added_per_gradient

MACHINE = {"cpu": "a CPU", "cores": 2, "torch": "2.15.0", "commit": "abc1234"}


def contest(verdict: str, ours: str = "fsdp, foreach", median: float = 0.5) -> dict[str, Any]:
    ratio = {"median": median, "quartiles": [0.4, 0.6], "target": 0.2, "verdict": verdict}
    return {"ours": ours, "theirs": "torch-fsdp2", "ratio": ratio}


def steps(*contests: dict[str, Any]) -> dict[str, Any]:
    """Results of bench_steps.py in which idle ranks take a quarter of torch's time."""
    taken = {"no sync": 50, "ddp": 62, "torch-fsdp2": 200, "1 process": 70}
    taken |= {"fsdp, foreach": 100, "dp": 80}
    runs = {label: [{"step_ms": step}] for label, step in taken.items()}
    return {"workloads": {"mlp": {"runs": runs, "contests": list(contests)}}, "machine": MACHINE}


def rows(files: dict[str, Any]) -> list[str]:
    return "\n".join(goals(files)).splitlines()[2:]


def test_misses_come_first_with_their_reason() -> None:
    found = steps(contest("met", ours="fsdp", median=0.1), contest("missed"))
    missed, met = rows({"steps": found})
    assert "| step, `fsdp, foreach` / torch's FSDP2 | `mlp`: 0.500 (0.2) | 2 ranks that" in missed
    assert missed.endswith("measured against: 0.25 (`mlp`) |  |")
    assert met.endswith("| step, `fsdp` / torch's FSDP2 |  |  | `mlp`: 0.100 (0.2) |")
    assert list(lacking({"steps": found})) == []
    assert list(goals({})) == []


def test_noise_and_quartiles_are_said() -> None:
    near = contest("met within noise (3 %)")
    between = {**contest("missed"), "ours": "zero1", "theirs": "ddp"}
    between["ratio"] = {**between["ratio"], "target": 0.45}
    missed, met = rows({"steps": steps(near, between)})
    assert "`mlp`: 0.500 (0.45; between quartiles)" in missed
    assert "`mlp`: 0.500 (0.2; within noise)" in met


def test_what_the_table_lacks_is_an_error() -> None:
    (line,) = lacking({"steps": steps({**contest("missed", ours="fsdp"), "theirs": "ddp"})})
    assert line == "got a missed goal without a reason: steps.json, step, `fsdp` / `ddp`"
    new = {"part": [{"ratio": {"target": 1.0, "verdict": "met"}}], "none": {"target": None}}
    (line,) = lacking({"steps": new})
    assert line == "got 0 rows for the target part/0/ratio of steps.json, expected 1"


def test_the_check_fails_where_a_goal_is_lacking(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.json").write_text(json.dumps({"part": {"verdict": "met"}}))
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    monkeypatch.setattr(readme_results, "PAGES", {})
    assert readme_results.main(["--check"]) == 1
    assert "got 0 rows for the target part of new.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("{zone}", r"got {zone} in benchmarks/pages/goals.md, expected a key of rows of new.json"),
        ("{why}", r"got {why} in benchmarks/pages/goals.md, expected one of {idle}"),
    ],
)
def test_a_mistyped_key_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str, text: str
) -> None:
    cells = ("new: part", "what", "case", "{median}", "{target:g}", "")
    row = " | ".join(
        wrong if cell == ("" if "why" in wrong else "case") else cell for cell in cells
    )
    (tmp_path / "goals.md").write_text(f"| head |\n| --- |\n| {row} |\n")
    monkeypatch.setattr(readme_goals, "TEMPLATES", tmp_path)
    part = {"median": 2.0, "target": 1.0, "verdict": "missed"}
    with pytest.raises(ValueError, match=text):
        rows({"new": {"part": part}})


def test_a_pipeline_is_bounded_by_its_arithmetic() -> None:
    row = {"schedule": "1f1b", "one_thread_ms": 180.0, "torch_ms": 200.0}
    ratio = {"median": 0.6, "target": 0.5, "verdict": "missed"}
    big = {"workload": "mlp", **row, "ratio": ratio}
    bubble = {"workload": "mlp", "schedule": "1f1b", "computed": 0.1, "measured": 0.11}
    found = {"steps": {"rows": [big], "bubbles": [bubble]}, "small": [{**row, "ratio": ratio}]}
    arithmetic, small = rows({"pipeline": found})
    assert "takes 100 ms, 0.50 of torch's (`mlp`, `1f1b`)" in arithmetic
    assert "this part of torch's: 0.45 (`1f1b`)" in small


def test_what_being_remote_adds() -> None:
    times = {"ours": [4500.0], "rpc": [6500.0], "local": [3250.0]}
    line = added_by_distance({"module": {"times_us": times}})
    assert "The layer alone takes 0.50 of RPC's time." in line
    assert "adds 1.2 ms to it here and 3.2 ms in RPC, a ratio of 0.38." in line
    assert added_by_distance({}) == ""


def test_what_averaging_adds() -> None:
    assert added_by_averaging(steps()).endswith("ranks that never talk by 12 ms (`mlp`).")


def test_the_reducer_is_said_by_gradient() -> None:
    runs = {
        "ddp": [{"bare_ms": 5.0, "wrapped_ms": 6.5}] * 3,
        "torch-fsdp2": [{"bare_ms": 5.0, "wrapped_ms": 8.0}] * 3,
    }
    results = {"reducer": {"runs": runs, "contests": [contest("missed", ours="ddp")]}}
    line = added_per_gradient(results)
    assert "1.5 us (ddp) beside 3.0 us (torch-fsdp2), ratio 0.50" in line


def test_the_pages_are_those_of_the_committed_runs() -> None:
    assert readme_results.main(["--check"]) == 0
