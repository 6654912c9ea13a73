"""Fills every cell of the table *part x part*; see pairs.py."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from contract.pair_columns import COLUMNS, difference, seen_alone, seen_by
from contract.pair_rows import ROWS
from contract.pairs import CELLS, NoPair, Refused, cell_of, grid
from contract.pairs import COLUMNS as COLUMNS_OF_PAGE
from harness.faults import message_of
from harness.meeting import PATIENCE_S, group_of_ranks, meet_again
from harness.ranks import run_ranks

Pair = tuple[str, str]
COMPILED = "`torch.compile`"


def test_every_row_has_a_cell_in_every_column() -> None:
    assert list(COLUMNS) == list(COLUMNS_OF_PAGE)
    assert list(grid()) == [(row, column) for row in ROWS for column in COLUMNS]
    assert set(grid().values()) == {"+", *CELLS}


@pytest.mark.parametrize("column", COLUMNS)
def test_column(column: str, tmp_path: Path) -> None:
    """All rows but those that change their processes."""
    fill([(row, column) for row in ROWS if row != COMPILED], tmp_path)


@pytest.mark.parametrize("world", [1, 2])
def test_compiled_layers(world: int, tmp_path: Path) -> None:
    """torch's compiler leaves much behind."""
    columns = [name for name, column in COLUMNS.items() if column.world == world]
    fill([(COMPILED, column) for column in columns], tmp_path, fresh=True)


def fill(pairs: list[Pair], folder: Path, **options: Any) -> None:
    world = COLUMNS[pairs[0][1]].world
    run_ranks(fill_on_rank, world, pairs, str(folder), timeout=100, **options)


def fill_on_rank(rank: int, pairs: list[Pair], folder: str) -> None:
    """Each cell has a group of its own, so that the next one does not see it."""
    wrong = []
    with group_of_ranks("trireme"):
        for number, (row, column) in enumerate(pairs):
            if isinstance(cell_of(row, column), NoPair):
                continue
            wrong += [f"{column} x {row}: {it}" for it in fill_cell(row, column, folder)]
            gc.collect()
            meet_again(f"cell {number}", PATIENCE_S)
    assert not wrong, "\n".join(wrong)


def fill_cell(row: str, column: str, folder: str) -> list[str]:
    expected = cell_of(row, column)
    own = Path(folder) / f"{row}{column}".replace("/", " ")
    own.mkdir(exist_ok=True)
    try:
        seen = seen_by(COLUMNS[column], ROWS[row], str(own))
    except Exception as error:
        text = f"{type(error).__name__}: {message_of(error)}"
        if not isinstance(expected, Refused) or type(error).__name__ != expected.kind:
            return [text]
        missing = [part for part in expected.text.split(" ... ") if part not in text]
        if missing or not expected.on_all:
            return [f"{missing} not in: {text}"] * bool(missing)
        return unusable()
    if isinstance(expected, Refused):
        may_go_on = not expected.on_all and dist.get_rank() > 0  # the first rank asks
        return [] if may_go_on else [f"is not refused; expected {expected.text!r}"]
    alone = seen_alone(COLUMNS[column], ROWS[row], str(own))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, set(seen))
    expected_names = (name for name in alone if not COLUMNS[column].drops(name))
    unseen = [
        f"no rank has {name}"
        for name in expected_names
        if not ROWS[row].stands_in(name) and not any(name in it for it in by_rank)
    ]
    return unseen + difference(seen, alone, ROWS[row].precise)


def unusable() -> list[str]:
    """Whether the group still works after a refusal."""
    count = torch.ones(())
    dist.all_reduce(count)
    return [] if count == dist.get_world_size() else ["the group is broken"]


def test_the_page_is_what_the_table_says() -> None:
    script = Path(__file__).resolve().parents[3] / "scripts" / "together.py"
    found = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
