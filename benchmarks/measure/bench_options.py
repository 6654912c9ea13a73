"""The options that the step benchmarks have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure.bad_input import BadInput, unknown_name
from measure.exit_codes import exit_code
from measure.machine import machine
from measure.results import write_results
from measure.strategies import require_trireme


def bench_parser(description: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """A parser for `--only` (some of `parts`), `--quick` and `--json`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(parts), help=f"out of {', '.join(parts)}")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all works")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


def let_add(parser: argparse.ArgumentParser) -> None:
    """The option `--add`, for benchmarks that are run in parts."""
    parser.add_argument(
        "--add", action="store_true", help="keep the parts that --json has and that are not run"
    )


def chosen_parts(area: str, only: str, parts: Sequence[str]) -> list[str]:
    """What `--only` says. Raises BadInput for a part that is not in `parts`, or without trireme."""
    chosen = [part.strip() for part in only.split(",")]
    for part in chosen:
        if part not in parts:
            raise unknown_name(area, "part", part, parts)
    require_trireme(area, "then run this again.")
    return chosen


def begin_results(quick: bool) -> dict[str, Any]:
    """What every result file of a step benchmark starts with; says so if the run is `quick`."""
    if quick:
        print("Quick run: too few rounds for a verdict that counts.\n")
    return {"machine": machine(), "quick": quick, "workloads": {}}


def earlier_results(area: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `--add` adds to. Raises BadInput if there is nothing."""
    if not arguments.add:
        return {}
    if arguments.json is None or not arguments.json.exists():
        raise BadInput(area, "got --add, expected --json with a file to add to", "Leave it out.")
    earlier: dict[str, Any] = json.loads(arguments.json.read_text())
    return earlier


def write_added(
    path: Path, results: dict[str, Any], earlier: dict[str, Any], parts: Sequence[str]
) -> None:
    """Writes `results` over `earlier`, and of which commit each of the parts is."""
    commits = dict.fromkeys(parts, results["machine"]["commit"])
    results["commits"] = {**earlier.get("commits", {}), **commits}
    if "workloads" in results:
        results["workloads"] = {**earlier.get("workloads", {}), **results["workloads"]}
    write_results(path, {**earlier, **results})


def run_in_parts(
    area: str,
    description: str | None,
    parts: Sequence[str],
    bench: Callable[[str, bool, dict[str, Any]], bool],
    command_line: Sequence[str] | None,
) -> int:
    """Is the main() of a benchmark that is run in parts; returns the exit code.

    `bench(part, quick, results)` puts what it has measured into `results`, and returns whether that
    is as it has to be. The file has every part as soon as that was measured.
    """
    parser = bench_parser(description, parts)
    let_add(parser)
    arguments = parser.parse_args(command_line)

    def run() -> int:
        chosen = chosen_parts(area, arguments.only, parts)
        earlier = earlier_results(area, arguments)
        results = begin_results(arguments.quick)
        code = 0
        for done, part in enumerate(chosen, start=1):
            if not bench(part, arguments.quick, results):
                code = 1
            if arguments.json is not None:
                write_added(arguments.json, results, earlier, chosen[:done])
        return code

    return exit_code(run)
