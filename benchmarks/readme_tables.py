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

A cell, or a line of text, with a value that is not there is empty; of all results that are
committed a row of the part has to have it. Texts see the file and what readme_rows.py adds to it.
"""

from __future__ import annotations

import itertools
import re
import statistics
import string
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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


class _NoSuchKey(NotThere):
    pass


class Keys:
    """The keys that a part of a template shows, and which of them a row has."""

    def __init__(self, template: str, file: str) -> None:
        self._template, self._file = template, file
        self._known: dict[str, bool] = {}

    def note(self, key: str, known: bool) -> None:
        self._known[key] = self._known.get(key, False) or known

    def check(self, files: Container[str]) -> None:
        """Raises ValueError for a key that no row has. One that reads of another file, which is not
        among ``files``, cannot be checked."""
        for key, known in self._known.items():
            is_there = self._file != "all" or re.split(r"[\[.]", key)[0] in files
            if not known and is_there:
                raise ValueError(
                    f"[readme] got {{{key}}} in benchmarks/pages/{self._template}.md, expected a "
                    f"key of rows of {self._file}.json. Correct the key."
                )


class _Formatter(string.Formatter):
    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value: Any = kwargs
        known = True
        try:
            for key in re.findall(r"[^\[\]]+", field_name):
                value = _item(value, key)
        except _NoSuchKey:
            known = False
            raise
        finally:
            if self._keys is not None:
                self._keys.note(field_name, known)
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
        raise _NoSuchKey from None
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


def text(shown: str, row: Json, keys: Keys | None = None) -> str:
    """Returns what a format says of a row: nothing if a value is not there."""
    try:
        return _Formatter(keys).vformat(shown, (), row)
    except NotThere:
        return ""


def found(
    results: Json, path: str, conditions: str | None = None, keys: Keys | None = None
) -> Iterator[tuple[Where, Json]]:
    """Yields where a row is, and the row, in which `all` is the whole file."""
    tests = [IS.split(condition) for condition in (conditions or "").split(" and ") if condition]
    for where, row in _walk(results, path.split("/") if path else [], (), {"all": results}):
        values = [(text(f"{{{key}}}", row, keys), verb, value) for key, verb, value in tests]
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
        if key not in self._texts:
            raise _NoSuchKey
        try:
            said = self._texts[key](self)
        except _NoSuchKey:  # what it looks for, not it
            raise NotThere from None
        if not said:
            raise NotThere
        return str(said)


def filled(
    name: str,
    files: Mapping[str, Json],
    rows_by: Adds,
    texts: Adds,
    *,
    complete: bool = False,
) -> Iterator[str]:
    """Yields the blocks of a template, those that have something to say.

    Raises:
        ValueError: a key that no row of its part has, if the results are ``complete``.
    """
    _, *parts = HEAD.split((TEMPLATES / f"{name}.md").read_text())
    for file, path, conditions, by, body in zip(*[iter(parts)] * 5, strict=True):
        if file in files:
            results, keys = _With(files[file], texts), Keys(name, file)
            rows: Iterable[Json] = (row for _, row in found(results, path, conditions, keys))
            if by:
                rows = itertools.chain.from_iterable(map(rows_by[by], rows))
            yield from filter(None, _part(body.strip().split("\n\n"), results, rows, keys))
            if complete:
                keys.check(files)


def _part(blocks: Sequence[str], results: _With, rows: Iterable[Json], keys: Keys) -> Iterator[str]:
    place = next((i for i, block in enumerate(blocks) if block.startswith("|")), None)
    if place is None:
        yield from (_lines(block, results, keys) for block in blocks)
        return

    def above(row: Json) -> str:
        return "\n\n".join(text(block, {**results, **row}, keys) for block in blocks[:place])

    grouped = [(title, list(group)) for title, group in itertools.groupby(rows, above)]
    for title, group in grouped:
        yield title
        yield _table(blocks[place], results, group, keys)
    if grouped:
        yield from (_lines(block, results, keys) for block in blocks[place + 1 :])


def _table(template: str, results: Json, rows: Sequence[Json], keys: Keys) -> str:
    head, rule, cells = template.split("\n")
    first = _cells(head, {**results, **rows[0]}, keys)
    return "\n".join([first, rule, *(_cells(cells, row, keys) for row in rows)])


def _cells(line: str, row: Json, keys: Keys) -> str:
    return "| " + " | ".join(text(cell, row, keys) for cell in line[2:-2].split(" | ")) + " |"


def _lines(block: str, results: _With, keys: Keys) -> str:
    return "\n".join(filter(None, (text(line, results, keys) for line in block.split("\n"))))
