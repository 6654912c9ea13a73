"""Runs of examples/python/ps_stragglers.py: workers of unequal speed under all modes.

Run as a rank (`python -m measure.straggler_runs CONFIG`) it trains under each mode and replies.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.ps_ranks import answer, ask_ranks

WORKERS = 4
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
BSP = "bsp"


@dataclass(frozen=True)
class StragglerCase:
    """`seconds`: of one mode."""

    seed: int
    seconds: float
    step_ms: float = 20.0
    slow_ms: float = 80.0


@dataclass(frozen=True)
class Straggled:
    """`seconds_to_good`: until worker 0 saw an accuracy of 95 %; None if it never did."""

    pattern: str
    mode: str
    updates_per_s: float
    seconds_to_good: float | None


def measure_stragglers(case: StragglerCase) -> list[Straggled]:
    """One run per pattern and mode, all in the same fresh processes."""
    return [Straggled(**row) for row in ask_ranks("measure.straggler_runs", case, WORKERS)]


def measure(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """What worker 0 says of each run."""
    sys.path.insert(0, str(EXAMPLES))
    import ps_stragglers

    case = StragglerCase(**fields)
    pace = ps_stragglers.Pace(case.seconds, case.step_ms, case.slow_ms)
    rows = []
    for pattern, mode in itertools.product(ps_stragglers.PATTERNS, ps_stragglers.MODES):
        found = ps_stragglers.train(mode, pattern, case.seed, pace)
        kept = {name: found[name] for name in ("updates_per_s", "seconds_to_good")}
        rows.append({"pattern": pattern, "mode": mode, **kept})
    return rows


if __name__ == "__main__":
    answer(measure)
