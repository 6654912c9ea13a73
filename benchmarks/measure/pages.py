"""Writes tables and lines as blocks of Markdown; a page is a sequence of them, less empty ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
Rows = Iterator[Json]
Blocks = Iterator[str]
Columns = Mapping[str, str | Callable[[Json], str]]  # a title has a format or a function


@dataclass(frozen=True)
class Table:
    """Declares how the results of a benchmark become a table."""

    title: str  # a format of the results
    columns: Columns
    rows: str | Callable[[Json], Iterable[Json]]  # what the results call them, or what finds them
    foot: Sequence[Callable[[Json], str]] = ()  # what is said under it

    def __call__(self, results: Json) -> Blocks:
        """Yields nothing where there are no rows."""
        found = results.get(self.rows, ()) if isinstance(self.rows, str) else self.rows(results)
        if rows := list(found):
            yield self.title.format_map(results)
            yield markdown(self.columns, rows)
            yield from (said(results) for said in self.foot)


def markdown(columns: Columns, rows: Iterable[Json]) -> str:
    cells = [
        [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        for row in rows
    ]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(key: str, shown: str) -> Callable[[Json], str]:
    """Returns a column that is empty in rows without the key, or a block likewise of results."""
    return lambda row: shown.format_map(row) if row.get(key) is not None else ""


def measured_on(results: Json) -> str:
    """Says which machine, torch and commit the figures are from."""
    machine = results["machine"]
    commits = sorted({*results.get("commits", {}).values()} or {machine["commit"]})
    parts = [
        f"{machine['cores']} cores of {machine['cpu']}",
        f"torch {machine['torch']}",
        "commit " + ", ".join(commits).replace("+", " with changes"),
        *([machine["date"]] if "date" in machine else []),
        "heap warm on all sides" if "allocator" in machine else "heap as glibc leaves it",
    ]
    return "Measured on " + ", ".join(parts) + "."


def median_of(runs: Sequence[Mapping[str, float]], quantity: str) -> float:
    return statistics.median(run[quantity] for run in runs)


def medians(all_runs: Json, quantities: Sequence[str]) -> Rows:
    """Yields the median of each quantity by label."""
    for label, runs in all_runs.items():
        yield {"label": label, **{name: median_of(runs, name) for name in quantities}}


def steps_of(workload: Json) -> dict[str, float]:
    """Returns the median step by label."""
    return {label: median_of(runs, "step_ms") for label, runs in workload["runs"].items()}
