"""Writes results as blocks of Markdown: a table declares where its rows are and what they show.

`rows` is a path in the results, such as "workloads/{workload}/contests": {workload} stands for
each key, which rows have as `workload`, and what is there as `in_workload`; a list at the end has
a row for each item.
`columns` are "title = format | title = format". A format shows
    a list of numbers  as their median, in `{times:.1f}`; `{runs[step_ms]}` is a list, too
    a ratio            as its median, in `{ratio:.2f}`; `{ratio:ratio}` adds quartiles
    its inverse        `{ratio:1/.0%}`; `{ratio:times}` with quartiles: how many times faster
and nothing at all if a value is not there. A function in place of a format takes the row.
"""

from __future__ import annotations

import re
import statistics
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
Rows = Iterator[Json]
Blocks = Iterator[str]
Shown = str | Callable[[Json], str]
Path = tuple[str, ...]  # keys, and numbers of list items, from the top of a file


class _NotThere(Exception):
    pass


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value: Any = kwargs
        for key in re.findall(r"[^\[\]]+", field_name):
            value = _item(value, key)
        if value is None:
            raise _NotThere
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Mapping):
            return _ratio_text(value, format_spec)
        if isinstance(value, list):
            if format_spec == "range":
                return f"{statistics.median(value):.1f} ({min(value):.1f} to {max(value):.1f})"
            value = statistics.median(value)
        if format_spec.startswith("1/"):
            return format(1 / value, format_spec[2:])
        return format(value, format_spec)


def _item(value: Any, key: str) -> Any:
    if isinstance(value, list) and not key.isdigit():
        return [item[key] for item in value]
    if isinstance(value, list):
        return value[int(key)]
    return value.get(key) if isinstance(value, Mapping) else None


def _ratio_text(ratio: Json, spec: str) -> str:
    median, (low, high) = ratio["median"], ratio.get("quartiles", (0, 0))
    if spec == "ratio":
        return f"{median:.3f} ({low:.3f} to {high:.3f})"
    if spec in ("times", "timesx"):
        return f"{1 / median:.1f}{spec[5:]} ({1 / high:.1f} to {1 / low:.1f})"
    return format(1 / median, spec[2:]) if spec.startswith("1/") else format(median, spec)


def text(shown: Shown, row: Json) -> str:
    """Returns what a format or a function says of a row: nothing if a value is not there."""
    if not isinstance(shown, str):
        return shown(row)
    try:
        return _Formatter().vformat(shown, (), row)
    except _NotThere:
        return ""


def found(results: Json, path: str) -> Iterator[tuple[Path, Json]]:
    """Yields where a row is, and the row, in which `all` is the whole file."""
    yield from _walk(results, path.split("/"), (), {"all": results})


def _walk(at: Any, path: Sequence[str], where: Path, bound: Json) -> Iterator[tuple[Path, Json]]:
    if not path:
        yield where, {**bound, **(at if isinstance(at, Mapping) else {"value": at})}
        return
    step, rest = path[0], path[1:]
    for key, item in _items(at):
        if step.startswith("{"):
            name = step.strip("{}")
            more = {**bound, name: key, f"in_{name}": item}
            yield from _walk(item, rest, (*where, key), more)
        elif step == key and isinstance(item, list) and not rest:
            yield from _walk(item, ["{number}"], (*where, key), bound)
        elif step == key:
            yield from _walk(item, rest, (*where, key), bound)


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, list):
        return ((str(number), item) for number, item in enumerate(value))
    return value.items() if isinstance(value, Mapping) else ()


def verdicts(value: Any, where: Path = ()) -> Iterator[Path]:
    """Yields where a goal is met or missed; a target that is null is no goal."""
    for key, item in _items(value):
        if key == "verdict":
            yield where
        elif key == "verdicts":
            yield from ((*where, key, name) for name in item)
        elif not (isinstance(item, Mapping) and "target" in item and item["target"] is None):
            yield from verdicts(item, (*where, key))


@dataclass(frozen=True)
class Table:
    """Declares how the results of a benchmark become a table; `each` adds to every row."""

    rows: str | Callable[[Json], Iterable[Json]]
    title: str
    columns: str | Mapping[str, Shown]
    foot: Sequence[Shown] = ()  # what is said under it
    each: Callable[[Json], Json] | None = None

    def __call__(self, results: Json) -> Blocks:
        """Yields nothing where there are no rows."""
        if isinstance(self.rows, str):
            rows: list[Json] = [row for _, row in found(results, self.rows)]
        else:
            rows = list(self.rows(results))
        if rows:
            yield text(self.title, results)
            yield markdown(self.columns, rows if self.each is None else map(self.each, rows))
            yield from (text(said, results) for said in self.foot)


def columns_of(declared: str | Mapping[str, Shown]) -> Mapping[str, Shown]:
    if not isinstance(declared, str):
        return declared
    cells = (cell.partition("= ") for cell in declared.split(" | "))
    return {title.strip(): shown.strip() for title, _, shown in cells}


def markdown(declared: str | Mapping[str, Shown], rows: Iterable[Json]) -> str:
    columns = columns_of(declared)
    cells = [[text(shown, row) for shown in columns.values()] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def every(*parts: Callable[[Json], Blocks]) -> Callable[[Json], Blocks]:
    """Returns what writes all parts that were run, and where."""

    def written(results: Json) -> Blocks:
        for part in parts:
            yield from part(results)
        yield measured_on(results)

    return written


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
