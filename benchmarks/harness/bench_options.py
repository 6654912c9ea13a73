"""The options that the step benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.bad_input import unknown_name
from harness.machine import machine
from harness.strategies import require_trireme


def bench_parser(description: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """A parser for `--only` (some of `parts`), `--quick` and `--json`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(parts), help=f"out of {', '.join(parts)}")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all works")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


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
        print("Quick run: too few pairs for a verdict that counts.\n")
    return {"machine": machine(), "quick": quick, "workloads": {}}
