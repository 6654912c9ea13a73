"""Fills the templates of benchmarks/pages with results: the one writer of tables.

A template has parts, each headed by a comment of HTML that says where its rows are:

    <!-- steps: workloads/{workload}/contests where ours begins zero by sides -->

That is: in steps.json a list for each workload, whose key a row has as `workload`, and what is
there as `in_workload`; of its items those whose `ours` begins so; and of each what the function
`sides` (readme_rows.py) makes of it. A part is text, then a table with one row of formats, then
text. It is left out if it has no rows, and written once for each text that its rows make of the
one above the table. A part without a path has all the file to show. A format shows

    a list of numbers  as their median, in `{times:.1f}`; `{runs[step_ms]}` is a list, too
    a ratio            as its median, in `{ratio:.2f}`; `{ratio:ratio}` adds quartiles
    its inverse        `{ratio:1/.0%}`; `{ratio:times}` with quartiles: how many times faster

A cell, or a line of text, with a value that is not there is empty. Texts see the file and what
readme_rows.py adds to it.
"""

from __future__ import annotations

import itertools
import re
import statistics
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]
Rows = Iterator[Json]
Where = tuple[str, ...]  # keys, and numbers of list items, from the top of a file

TEMPLATES = Path(__file__).resolve().parent / "pages"
PATH = r"(\w+): ?(\S*?)(?: where (.*?))?(?: by (\w+))?"
HEAD = re.compile(f"<!-- {PATH} -->\n")
IS = re.compile(r" (is|begins) ")


class NotThere(Exception):
    """A row, or a file, has no such value."""


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value: Any = kwargs
        for key in re.findall(r"[^\[\]]+", field_name):
            value = _item(value, key)
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Mapping):
            return _ratio_text(value, format_spec)
        if isinstance(value, list) and format_spec == "range":
            return f"{statistics.median(value):.1f} ({min(value):.1f} to {max(value):.1f})"
        value = statistics.median(value) if isinstance(value, list) else value
        inverse = format_spec.startswith("1/")
        return format(1 / value if inverse else value, format_spec.removeprefix("1/"))


def _item(value: Any, key: str) -> Any:
    if isinstance(value, list) and not key.isdigit():
        return [item[key] for item in value]
    try:
        item = value[int(key)] if isinstance(value, list) else value[key]
    except (KeyError, TypeError):
        raise NotThere from None
    if item is None:
        raise NotThere
    return item


def _ratio_text(ratio: Json, spec: str) -> str:
    median, (low, high) = ratio["median"], ratio.get("quartiles", (1, 1))
    if spec == "ratio":
        return f"{median:.3f} ({low:.3f} to {high:.3f})"
    if spec in ("times", "timesx"):
        return f"{1 / median:.1f}{spec[5:]} ({1 / high:.1f} to {1 / low:.1f})"
    return format(1 / median, spec[2:]) if spec.startswith("1/") else format(median, spec)


def text(shown: str, row: Json) -> str:
    """Returns what a format says of a row: nothing if a value is not there."""
    try:
        return _Formatter().vformat(shown, (), row)
    except NotThere:
        return ""


def found(results: Json, path: str, conditions: str | None = None) -> Iterator[tuple[Where, Json]]:
    """Yields where a row is, and the row, in which `all` is the whole file."""
    tests = [IS.split(condition) for condition in (conditions or "").split(" and ") if condition]
    for where, row in _walk(results, path.split("/") if path else [], (), {"all": results}):
        values = [(text(f"{{{key}}}", row), verb, value) for key, verb, value in tests]
        if all(got == v if verb == "is" else got.startswith(v) for got, verb, v in values):
            yield where, row


def _walk(at: Any, path: Sequence[str], where: Where, bound: Json) -> Iterator[tuple[Where, Json]]:
    if not path:
        yield where, {**bound, **(at if isinstance(at, Mapping) else {"value": at})}
        return
    step, rest = path[0], path[1:]
    for key, item in items(at):
        if step.startswith("{"):
            name = step.strip("{}")
            more = {**bound, name: key, f"in_{name}": item}
            yield from _walk(item, rest, (*where, key), more)
        elif step == key and isinstance(item, list) and not rest:
            yield from _walk(item, ["{number}"], (*where, key), bound)
        elif step == key:
            yield from _walk(item, rest, (*where, key), bound)


def items(value: Any) -> Iterable[tuple[str, Any]]:
    """Returns keys and values of a mapping or a list; of anything else there are none."""
    if isinstance(value, list):
        return ((str(number), item) for number, item in enumerate(value))
    return value.items() if isinstance(value, Mapping) else ()


def look(value: Any, where: Where) -> Any:
    """Returns what is at a place."""
    for key in where:
        value = value[int(key) if isinstance(value, list) else key]
    return value


Adds = Mapping[str, Callable[[Json], Any]]


class _With(dict[str, Any]):
    """A file with what is computed of it when a text asks for it."""

    def __init__(self, results: Json, texts: Adds) -> None:
        super().__init__(results)
        self._texts = texts

    def __missing__(self, key: str) -> str:
        if key not in self._texts or not (said := self._texts[key](self)):
            raise NotThere
        return str(said)


def filled(name: str, files: Mapping[str, Json], rows_by: Adds, texts: Adds) -> Iterator[str]:
    """Yields the blocks of a template, those that have something to say."""
    _, *parts = HEAD.split((TEMPLATES / f"{name}.md").read_text())
    for file, path, conditions, by, body in zip(*[iter(parts)] * 5, strict=True):
        if file in files:
            results = _With(files[file], texts)
            rows: Iterable[Json] = (row for _, row in found(results, path, conditions))
            if by:
                rows = itertools.chain.from_iterable(map(rows_by[by], rows))
            yield from filter(None, _part(body.strip().split("\n\n"), results, rows))


def _part(blocks: Sequence[str], results: _With, rows: Iterable[Json]) -> Iterator[str]:
    place = next((i for i, block in enumerate(blocks) if block.startswith("|")), None)
    if place is None:
        yield from (_lines(block, results) for block in blocks)
        return

    def above(row: Json) -> str:
        return "\n\n".join(text(block, {**results, **row}) for block in blocks[:place])

    grouped = [(title, list(group)) for title, group in itertools.groupby(rows, above)]
    for title, group in grouped:
        yield title
        yield _table(blocks[place], results, group)
    if grouped:
        yield from (_lines(block, results) for block in blocks[place + 1 :])


def _table(template: str, results: Json, rows: Sequence[Json]) -> str:
    head, rule, cells = template.split("\n")
    return "\n".join(
        [_cells(head, {**results, **rows[0]}), rule, *(_cells(cells, r) for r in rows)]
    )


def _cells(line: str, row: Json) -> str:
    return "| " + " | ".join(text(cell, row) for cell in line[2:-2].split(" | ")) + " |"


def _lines(block: str, results: _With) -> str:
    return "\n".join(filter(None, (text(line, results) for line in block.split("\n"))))
