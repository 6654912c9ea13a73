"""What goes wrong on purpose, and how an error must read."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.meeting import store

# [area] what went wrong (rank r of w). next step
HOUSE_FORM = re.compile(r"^\[\w+\] \S.* \(rank \d+ of \d+\)\. [A-Z].*\S$", re.DOTALL)


# Before a group is known the form names no rank.
RANKLESS_FORM = re.compile(r"^\[\w+\] \S.*[^.)]\. [A-Z].*\S$", re.DOTALL)


@contextmanager
def raises(
    kind: type[BaseException], *parts: str, form: re.Pattern[str] = HOUSE_FORM
) -> Iterator[None]:
    """Expects an error of that form whose text contains ``parts``."""
    try:
        yield
    except kind as error:
        text = message_of(error)
        assert form.match(text), f"not in the house form: {text}"
        missing = [part for part in parts if part not in text]
        assert not missing, f"{missing} not in: {text}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


@contextmanager
def in_case(name: object) -> Iterator[None]:
    """Names the entry of a table in what goes wrong with it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{name}: {error}") from error


def message_of(error: BaseException) -> str:
    """Without the C++ stack that torch adds when asked to."""
    return str(error).split("\nException raised from")[0].strip()


def break_it(*_: Any) -> None:
    raise ArithmeticError("the data of this rank are broken")


class Breaks(torch.autograd.Function):
    """The identity; its backward raises when told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, breaks: bool) -> torch.Tensor:
        ctx.breaks = breaks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.breaks:
            break_it()
        return grad, None


def kill_this_rank(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note_death() -> None:
    """Tells other ranks that one dies now: this one, or one that it kills."""
    store().set("died at", str(time.monotonic()))  # one clock for all processes


def seconds_since_death() -> float:
    return time.monotonic() - float(store().get("died at"))
