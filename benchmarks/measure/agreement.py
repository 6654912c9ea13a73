"""The proof that strategies train the same model: their losses, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ASSERTED_STEPS = 5
RELATIVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Agreement:
    """How far the losses of `run` lie from those of `reference`, relative to the latter.

    `first` covers the first five steps and is asserted; `later` covers the rest and is only shown:
    rounding differs between the strategies and training amplifies it.
    """

    run: str
    reference: str
    first: float
    later: float
    holds: bool

    def line(self) -> str:
        state = "agree" if self.holds else "DIFFER"
        return (
            f"{self.run:<12} {state} with {self.reference}: {self.first:.1e} over the first "
            f"{ASSERTED_STEPS} steps (limit {RELATIVE_TOLERANCE:.0e}), "
            f"{self.later:.1e} over the rest (shown only)"
        )


def agreements(losses: Mapping[str, Sequence[float]]) -> list[Agreement]:
    """Every run against the first one."""
    reference, *others = losses
    found = []
    for run in others:
        apart = [
            abs(a - b) / max(abs(b), 1e-12)
            for a, b in zip(losses[run], losses[reference], strict=True)
        ]
        first, later = apart[:ASSERTED_STEPS], apart[ASSERTED_STEPS:]
        # Not their maximum is compared: it can hide a loss that is not a number.
        holds = all(gap <= RELATIVE_TOLERANCE for gap in first)
        found.append(Agreement(run, reference, max(first), max(later, default=0.0), holds))
    return found
