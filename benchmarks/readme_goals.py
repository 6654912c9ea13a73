"""Writes the one table of goals: each target of the results, met or missed, and why it is missed.

benchmarks/pages/goals.md declares its rows. A target that no row has, or that is missed for no
reason that is given there, is an error.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from readme_rows import ROWS
from readme_steps import steps_of
from readme_tables import PATH, TEMPLATES, Json, Keys, Where, found, items, look, text

TABLE = (
    "| run | what | missed: result (goal) | why it is missed | met: result (goal) |",
    "| --- | --- | --- | --- | --- |",
)
Missed = Sequence[Json]


@dataclass(frozen=True)
class Goal:
    """A row of the template. `file` and `path` lead to what has the verdicts."""

    file: str
    path: str
    conditions: str | None
    by: str | None
    what: str
    case: str
    result: str
    goal: str
    why: str

    def rows(self, results: Json) -> Iterator[Json]:
        """Yields what has a verdict, as `where`, with the verdict."""
        known = set(verdicts(results))
        for where, row in found(results, self.path, self.conditions):
            if where in known:
                verdict = row.get("verdict", row.get("value"))
                (shown,) = ROWS[self.by](row) if self.by else (row,)
                if "verdicts" in where:  # beside which are the times
                    shown = {**shown, "us": look(results, where[:-2])["times_us"][where[-1]]}
                yield {**shown, "where": where, "verdict": verdict}

    def said(self, rows: Sequence[Json], keys: Keys) -> str:
        return "; ".join(self._result(row, keys) for row in rows)

    def _result(self, row: Json, keys: Keys) -> str:
        low, high = row.get("quartiles", (1, 0))
        noise = "within noise" if "noise" in row["verdict"] else ""
        spread = "between quartiles" if missed(row) and low <= row.get("target", 0) <= high else ""
        beside = "; ".join(filter(None, [text(self.goal, row, keys), noise, spread]))
        return f"{text(self.case, row, keys)}: {text(self.result, row, keys)} ({beside})"

    def reason(self, rows: Missed) -> str:
        def said(shown: re.Match[str]) -> str:
            if shown[0] not in WHYS:
                raise ValueError(
                    f"[readme] got {shown[0]} in benchmarks/pages/goals.md, expected one of "
                    f"{', '.join(WHYS)}. Correct the name."
                )
            return WHYS[shown[0]](rows)

        return re.sub(r"\{\w+\}", said, self.why)


def missed(row: Json) -> bool:
    return bool(row["verdict"] == "missed")


def verdicts(value: Any, where: Where = ()) -> Iterator[Where]:
    """Yields where a goal is met or missed; a target that is null is no goal."""
    for key, item in items(value):
        if key == "verdict":
            yield where
        elif key == "verdicts":
            yield from ((*where, key, name) for name in item)
        elif not (isinstance(item, Mapping) and "target" in item and item["target"] is None):
            yield from verdicts(item, (*where, key))


def _idle(rows: Missed) -> str:
    """Says the time of ranks that never talk."""
    each = []
    for row in rows:
        steps = steps_of(row["in_workload"])
        share = steps["no sync"] / steps[row["in_n"]["theirs"]]
        each.append(f"{share:.2f} (`{row['workload']}`)")
    return (
        "2 ranks that synchronize nothing take this part of the time of what is measured against: "
        + "; ".join(each)
    )


def _arithmetic(rows: Missed) -> str:
    """Says how long a pipeline takes at least."""
    each = []
    for row in (row["in_n"] | {"all": row["all"]} for row in rows):
        which = f"workload is {row['workload']} and schedule is {row['schedule']}"
        ((_, bubble),) = found(row["all"], "steps/bubbles", which)
        least = row["one_thread_ms"] / 2 / (1 - bubble["computed"])
        said = text("of torch's (`{workload}`, `{schedule}`)", row)
        each.append(f"{least:.0f} ms, {least / row['torch_ms']:.2f} {said}")
    return (
        "The arithmetic alone, half the time of one thread divided by one less the computed "
        f"bubble, takes {'; '.join(each)}"
    )


def _half_a_thread(rows: Missed) -> str:
    each = [
        f"{row['one_thread_ms'] / 2 / row['torch_ms']:.2f} (`{row['schedule']}`)"
        for row in (row["in_n"] for row in rows)
    ]
    return f"Half the time of one thread is already this part of torch's: {'; '.join(each)}"


def _layer_alone(rows: Missed) -> str:
    times = rows[0]["all"]["module"]["times_us"]
    local, rpc = statistics.median(times["local"]), statistics.median(times["rpc"])
    return f"The layer alone takes {local / rpc:.2f} of RPC's time"


WHYS: Mapping[str, Callable[[Missed], str]] = {
    "{idle}": _idle,
    "{arithmetic}": _arithmetic,
    "{half_a_thread}": _half_a_thread,
    "{layer_alone}": _layer_alone,
}


def declared() -> Iterator[Goal]:
    """Yields the rows of the template."""
    for line in (TEMPLATES / "goals.md").read_text().splitlines()[2:]:
        where, what, case, result, goal, why = line[2:-2].split(" | ")
        file, path, conditions, by = re.findall(f"^{PATH}$", where)[0]
        result, goal = result or "{median:.3f}", goal or "{target:g}"
        yield Goal(file, path, conditions, by, what, case, result, goal, why.strip())


def _groups(files: Mapping[str, Json]) -> Iterator[tuple[Goal, str, list[Json], Keys]]:
    for goal in declared():
        groups: dict[str, list[Json]] = {}
        keys = Keys("goals", goal.file)
        for row in goal.rows(files.get(goal.file, {})):
            groups.setdefault(text(goal.what, row, keys), []).append(row)
        yield from ((goal, what, rows, keys) for what, rows in groups.items())


def goals(files: Mapping[str, Json]) -> Iterator[str]:
    """Yields the table, rows with misses first.

    Raises:
        ValueError: a key that no row has.
    """
    lines: dict[bool, list[str]] = {True: [], False: []}
    for goal, what, rows, keys in _groups(files):
        bad, good = [*filter(missed, rows)], [row for row in rows if not missed(row)]
        why = goal.reason(bad) if bad else ""
        cells = (f"`{goal.file}`", what, goal.said(bad, keys), why, goal.said(good, keys))
        keys.check(files)
        lines[bool(bad)].append("| " + " | ".join(cells) + " |")
    if any(lines.values()):
        yield "\n".join([*TABLE, *lines[True], *lines[False]])


def lacking(files: Mapping[str, Json]) -> Iterator[str]:
    """Yields which targets have no row, and which missed ones no reason."""
    shown: dict[str, list[Where]] = {}
    for goal, what, rows, _ in _groups(files):
        shown.setdefault(goal.file, []).extend(row["where"] for row in rows)
        bad = [*filter(missed, rows)]
        if bad and not goal.reason(bad):
            yield f"got a missed goal without a reason: {goal.file}.json, {what}"
    for file, results in files.items():
        for where in verdicts(results):
            if (times := shown.get(file, []).count(where)) != 1:
                target = "/".join(where)
                yield f"got {times} rows for the target {target} of {file}.json, expected 1"
