"""The figures that explain misses are computed from the JSON that the tables are from."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import readme_results
from readme_bounds import (
    added_by_averaging,
    added_per_gradient,
    idle_ranks,
    pipeline_bounds,
    remote_bounds,
)


def contest(verdict: str, ours: str = "fsdp") -> dict[str, Any]:
    ratio = {"median": 0.5, "target": 0.2, "verdict": verdict}
    return {"ours": ours, "theirs": "torch-fsdp2", "ratio": ratio}


def test_idle_ranks_stand_beside_what_was_missed_and_nothing_else() -> None:
    taken = {"no sync": 50, "ddp": 62, "torch-fsdp2": 200}
    runs = {label: [{"step_ms": step}] for label, step in taken.items()}
    contests = [contest("missed"), contest("met"), contest("missed", ours="dp")]
    results = {"workloads": {"mlp": {"runs": runs, "contests": contests}}}
    (line,) = idle_ranks("fsdp")(results)
    assert line.endswith("measured against: 0.25 of torch-fsdp2 (`mlp`, target 0.2).")
    assert list(idle_ranks("zero")(results)) == []
    (line,) = added_by_averaging(results)
    assert line.endswith("ranks that never talk by 12 ms (`mlp`).")


def test_the_reducer_is_said_by_gradient() -> None:
    runs = {
        "ddp": [{"bare_ms": 5.0, "wrapped_ms": 6.5}] * 3,
        "torch-fsdp2": [{"bare_ms": 5.0, "wrapped_ms": 8.0}] * 3,
    }
    results = {"reducer": {"runs": runs, "contests": [contest("missed", ours="ddp")]}}
    (line,) = added_per_gradient(results)
    assert "1.5 us (ddp) beside 3.0 us (torch-fsdp2), ratio 0.50, target 0.2" in line


def test_a_pipeline_is_bounded_by_its_arithmetic() -> None:
    row = {"schedule": "1f1b", "one_thread_ms": 180.0, "torch_ms": 200.0}
    missed, met = ({"ratio": {"verdict": verdict}, **row} for verdict in ("missed", "met"))
    rows = [{"workload": "mlp", **missed}, {"workload": "gpt", **met}]
    bubbles = [{"workload": row["workload"], "schedule": "1f1b", "computed": 0.1} for row in rows]
    steps = {"rows": rows, "bubbles": bubbles}
    arithmetic, small = pipeline_bounds({"steps": steps, "small": [missed, met]})
    assert arithmetic.endswith("`mlp` under `1f1b` 100 ms, which is 0.50 of torch's time.")
    assert small.endswith("torch's: 0.45 under `1f1b`.")
    assert list(pipeline_bounds({})) == []


def test_what_being_remote_adds() -> None:
    times = {"ours": [4500.0], "rpc": [6500.0], "local": [3250.0]}
    (line,) = remote_bounds({"module": {"times_us": times}})
    assert "The layer alone takes 0.50 of RPC's time." in line
    assert "adds 1.2 ms to it here and 3.2 ms in RPC, a ratio of 0.38." in line
    assert list(remote_bounds({})) == []


def test_the_pages_are_those_of_the_committed_runs() -> None:
    assert readme_results.main(["--check"]) == 0
