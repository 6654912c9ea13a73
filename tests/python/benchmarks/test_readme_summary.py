"""The lines of README's summary: they say what the JSON says, also where it is unpleasant."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import readme_tables
from readme_rows import ROWS, TEXTS, measured_on, memory_beside_fsdp2, slower
from readme_tables import filled

MACHINE = {"cpu": "a CPU", "cores": 2, "torch": "2.15.0", "commit": "abc1234+"}


def lead(files: dict[str, Any]) -> list[str]:
    """What README says of these results."""
    return list(filled("readme", {**files, "all": files}, ROWS, TEXTS))


def steps(alone_ms: float, **ratios: float) -> dict[str, Any]:
    """Results of bench_steps.py in which one process takes so long."""
    taken = {"1 process": alone_ms, "no sync": 30, "fsdp": 50, "torch-fsdp2": 200}
    runs: dict[str, Any] = {label: [{"step_ms": step}] * 8 for label, step in taken.items()}
    runs["fsdp, trireme.optim"] = [{"step_ms": 20}]
    contest = {"ours": "fsdp", "theirs": "torch-fsdp2", "ratio": {"median": 0.25}}
    others = [
        {"ours": ours, "theirs": "1 process", "ratio": {"median": ratio}}
        for ours, ratio in ratios.items()
    ]
    workload = {"runs": runs, "contests": [contest, *others]}
    return {"machine": MACHINE, "workloads": {"mlp": workload}}


def test_one_process_is_named_where_it_wins_and_where_it_loses() -> None:
    (wins,) = lead({"steps": steps(40)})
    assert (
        "faster than ranks** where layers are large: `mlp` 40 ms, the best ranks 50 (fsdp)" in wins
    )
    assert "Ranks are faster" not in wins
    (loses,) = lead({"steps": steps(60)})
    assert "as many threads: `mlp` 60 ms, the best ranks 50 (fsdp)" in loses
    assert "One process" not in loses


def test_what_is_slower_is_named_and_nothing_else() -> None:
    step = {"time_ratio": {"median": 1.317}}
    even = {"time_ratio": {"median": 1.01}}
    found = {
        "steps": steps(60, dp=1.494),
        "optimizers": {"devices": {"cpu": {"AdamW, bfloat16": step, "SGD": even}}},
    }
    line = slower(found)
    assert "dp on `mlp` 1.49 of 1 process" in line
    assert "AdamW, bfloat16 (cpu) 1.32" in line and "SGD" not in line and "fsdp" not in line


def test_memory_stands_beside_torchs() -> None:
    row = {"workload": "mlp", "ranks": 2}
    rows = [
        {**row, "side": "fsdp", "between_steps": 291.0, "after_backward": 338.0},
        {**row, "side": "torch-fsdp2", "between_steps": 248.0, "after_backward": 643.0},
    ]
    text = memory_beside_fsdp2({"memory": {"workloads": {"mlp": {"memory": rows}}}})
    assert text == "`mlp` at 2 ranks 291 against 248 MiB (after a backward 338 against 643)"
    assert lead({}) == []


def test_what_is_not_there_leaves_a_cell_or_a_line_empty() -> None:
    page = list(filled("strategies", {"steps": steps(60)}, ROWS, TEXTS))
    assert "| 1 process x 2 threads |  |  |  |  |  |" in page[1]
    assert "2 cores of a CPU" in page[2]
    assert list(filled("remote", {"pipeline": {}}, ROWS, TEXTS)) == []


@pytest.mark.parametrize(
    ("head", "cell", "wrong"),
    [
        ("runs", "{median:.1f} | {zone}", "zone"),
        ("runs", "{in_runs[zone]}", "in_runs[zone]"),
        ("runs where zone is a", "{median}", "zone"),
    ],
)
def test_a_mistyped_key_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head: str, cell: str, wrong: str
) -> None:
    (tmp_path / "page.md").write_text(f"<!-- new: {head} -->\n| a |\n| --- |\n| {cell} |\n")
    monkeypatch.setattr(readme_tables, "TEMPLATES", tmp_path)
    results = {"new": {"runs": [{"median": 1.0}, {"median": None}]}}
    where = re.escape(
        f"{{{wrong}}} in benchmarks/pages/page.md, expected a key of rows of new.json"
    )
    with pytest.raises(ValueError, match=where):
        list(filled("page", results, {}, {}, complete=True))


def test_a_key_that_some_rows_have_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = "<!-- new: runs -->\n| a |\n| --- |\n| {a} | {b} |\n\n{said}\n"
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setattr(readme_tables, "TEMPLATES", tmp_path)
    results = {"new": {"runs": [{"a": 1}, {"a": 2, "b": None}]}}
    texts = {"said": lambda found: found["nothing"]}
    (table,) = filled("page", results, {}, texts, complete=True)
    assert table.splitlines()[2:] == ["| 1 |  |", "| 2 |  |"]


def test_the_slowest_rank_says_how_soon_a_death_is_known() -> None:
    cases = [
        {"kind": "killed before", "ranks": 2, "max_ms": 53.9},
        {"kind": "killed inside", "ranks": 2, "max_ms": 54.8},
        {"kind": "stopped before", "ranks": 2, "max_ms": 2011.1},
        {"kind": "killed after", "ranks": 4, "max_ms": 65.0},
    ]
    (line,) = lead({"faults": {"cases": cases, "tries": 10}})
    assert line == (
        "* **When a rank is killed**, the others have raised within 55 ms at 2 ranks, 65 ms at 4 "
        "ranks (the most in 10 tries of each kind)."
    )


def test_a_table_says_where_it_was_measured() -> None:
    assert measured_on({"machine": MACHINE}) == (
        "Measured on 2 cores of a CPU, torch 2.15.0, commit abc1234 with changes, heap as glibc "
        "leaves it."
    )
    machine = {**MACHINE, "allocator": "kept warm", "date": "2026-11-22"}
    text = measured_on({"machine": machine, "commits": {"a": "b1", "b": "a1", "c": "b1"}})
    assert "commit a1, b1, 2026-11-22, heap warm on all sides" in text
