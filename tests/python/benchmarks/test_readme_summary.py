"""The lines above README's tables: they say what the JSON says, also where it is unpleasant."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from harness.pages import measured_on
from readme_summary import summary

MACHINE = {"cpu": "a CPU", "cores": 2, "torch": "2.15.0", "commit": "abc1234+"}


def fsdp(alone_ms: float) -> dict[str, Any]:
    """Results of bench_fsdp.py in which one process takes so long."""
    steps = {"1 process": alone_ms, "2 ranks, no sync": 30, "fsdp": 50, "torch-fsdp2": 200}
    ratio = {"median": 0.25}
    memory = {"workload": "mlp", "ranks": 2}
    return {
        "machine": MACHINE,
        "workloads": {
            "mlp": {
                "runs": {label: [{"step_ms": step}] for label, step in steps.items()},
                "contests": [{"ours": "fsdp", "theirs": "torch-fsdp2", "ratio": ratio}],
            }
        },
        "memory": [
            {**memory, "side": "fsdp", "between_steps": 291.0, "after_backward": 338.0},
            {**memory, "side": "torch-fsdp2", "between_steps": 248.0, "after_backward": 643.0},
        ],
    }


def test_one_process_that_is_faster_than_all_ranks_is_named() -> None:
    assert "`mlp` 40 ms, the best ranks 50 (fsdp)" in "".join(summary({"fsdp": fsdp(40)}))
    assert "One process" not in "".join(summary({"fsdp": fsdp(60)}))


def test_what_is_slower_is_named_and_nothing_else() -> None:
    contest = {"ours": "dp", "theirs": "1 process", "ratio": {"median": 1.494}}
    step = {"time_ratio": {"median": 1.317}}
    even = {"time_ratio": {"median": 1.01}}
    found = {
        "fsdp": fsdp(60),
        "dp": {"workloads": {"narrow": {"runs": {}, "contests": [contest]}}},
        "optimizers": {"devices": {"cpu": {"AdamW, bfloat16": step, "SGD": even}}},
    }
    (text,) = summary(found)
    (line,) = (line for line in text.splitlines() if "Slower" in line)
    assert "dp on `narrow` 1.49 of 1 process" in line
    assert "AdamW, bfloat16 (cpu) 1.32" in line and "SGD" not in line and "fsdp" not in line


def test_memory_stands_beside_torchs() -> None:
    (text,) = summary({"fsdp": fsdp(60)})
    assert "`mlp` at 2 ranks 291 against 248 MiB (after a backward 338 against 643)" in text
    assert "0.25 (mlp)" in text
    assert list(summary({})) == [""]


def test_a_table_says_where_it_was_measured() -> None:
    assert measured_on({"machine": MACHINE}) == (
        "Measured on 2 cores of a CPU, torch 2.15.0, commit abc1234 with changes, heap as glibc "
        "leaves it."
    )
    machine = {**MACHINE, "allocator": "kept warm", "date": "2026-11-22"}
    text = measured_on({"machine": machine, "commits": {"a": "b1", "b": "a1", "c": "b1"}})
    assert "commit a1, b1, 2026-11-22, heap warm on all sides" in text
