"""A caller's mistake, told in one line: `[area] got X, expected Y. Next step.`"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable


class BadInput(Exception):
    """Raised for wrong options; a script prints the text and ends with exit code 2."""

    def __init__(self, area: str, got_and_expected: str, next_step: str) -> None:
        super().__init__(f"[{area}] {got_and_expected}. {next_step}")


def unknown_name(area: str, kind: str, got: str, known: Iterable[str]) -> BadInput:
    """The error for a name that is not in `known`, with the nearest known one as the next step."""
    names = list(known)
    near = difflib.get_close_matches(got, names, n=1, cutoff=0.5)
    next_step = f"Did you mean {near[0]!r}?" if near else f"Choose one of them for the {kind}."
    return BadInput(area, f"got {kind} {got!r}, expected one of {', '.join(names)}", next_step)


def expect_positive(area: str, arguments: argparse.Namespace, *options: str) -> None:
    """Raises BadInput for the first of these options that was given a number of 0 or less."""
    for option in options:
        value = getattr(arguments, option)
        if value is not None and value <= 0:
            raise BadInput(area, f"got --{option} {value}, expected more than 0", "Raise it.")
