"""One progress bar per run on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol


class Progress(Protocol):
    """Told of every step (`done` of about `total`) and of every finished round of a run."""

    def step(self, run: str, done: int, total: int, loss: float) -> None: ...

    def round(self, run: str, done: int, loss: float, step_ms: float) -> None: ...

    def close(self) -> None: ...


class Bars:
    """tqdm bars, one per run, below each other. Their text has one width, so that they align."""

    def __init__(self, runs: Sequence[str], tqdm: Any) -> None:
        self._width = max(len(run) for run in runs)
        self._speed = dict.fromkeys(runs, "warm-up")
        self._bars = {
            run: tqdm(
                desc=f"{run:<{self._width}}  starting".ljust(self._width + 43),
                position=position,
                bar_format="{desc}|{bar}|{percentage:3.0f}%",
                dynamic_ncols=True,
                total=1,
            )
            for position, run in enumerate(runs)
        }

    def step(self, run: str, done: int, total: int, loss: float) -> None:
        bar = self._bars[run]
        bar.total = max(total, done)
        bar.n = done
        counts = f"{done:>5}/{bar.total:<5}"
        text = f"{run:<{self._width}}  {counts} loss {loss:7.4f}  {self._speed[run]:>15} "
        bar.set_description_str(text)

    def round(self, run: str, done: int, loss: float, step_ms: float) -> None:
        self._speed[run] = f"{step_ms:.1f} ms/step"
        self.step(run, done, int(self._bars[run].total), loss)

    def close(self) -> None:
        for bar in self._bars.values():
            bar.total = bar.n
            bar.close()


class Lines:
    """One line per run and round, for logs."""

    def step(self, run: str, done: int, total: int, loss: float) -> None:
        pass

    def round(self, run: str, done: int, loss: float, step_ms: float) -> None:
        text = f"{run:<12} step {done:>5}  loss {loss:8.4f}  {step_ms:8.1f} ms/step"
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def progress(runs: Sequence[str]) -> Progress:
    """Bars if standard error is a terminal and tqdm is installed, else lines."""
    if not sys.stderr.isatty():
        return Lines()
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return Lines()
    return Bars(runs, tqdm)
