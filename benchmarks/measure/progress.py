"""One progress bar per run, or one for all with the time left; plain lines where no terminal is."""

from __future__ import annotations

import sys
import threading
import time
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


class Countdown:
    """One bar for a job that takes `total_s` seconds, with the time left; several runs in turn.

    On a terminal with tqdm it moves by itself; elsewhere a line is printed every `LINE_S` seconds.
    """

    REDRAW_S, LINE_S = 0.5, 15.0

    def __init__(self, total_s: float) -> None:
        self._total_s, self._began = total_s, time.monotonic()
        self._what = self._job = "starting"
        self._ended = threading.Event()
        self._bar = None
        tqdm = tqdm_for_terminal()
        if tqdm is not None:
            form = "{desc:<44.44}|{bar}| {percentage:3.0f}%{postfix}"
            self._bar = tqdm(total=total_s, bar_format=form, dynamic_ncols=True, leave=False)
        self._redrawing = threading.Thread(target=self._redraw, daemon=True)
        self._redrawing.start()

    def begin(self, job: str, doing: str) -> None:
        """From now on the runs are those of `job`; before their first step it is `doing`."""
        self._job, self._what = job, f"{job}: {doing}"

    def step(self, run: str, done: int, total: int, loss: float) -> None:
        pass

    def round(self, run: str, done: int, loss: float, step_ms: float) -> None:
        self._what = f"{self._job}: {run:<11} {step_ms:6.1f} ms/step"

    def close(self) -> None:
        """The runs of one job have ended; another may begin."""

    def end(self) -> None:
        self._ended.set()
        self._redrawing.join()
        if self._bar is not None:
            self._bar.close()

    def _redraw(self) -> None:
        pause = self.LINE_S if self._bar is None else self.REDRAW_S
        while not self._ended.wait(pause):
            done = time.monotonic() - self._began
            left = f"about {_minutes(self._total_s - done)} left"
            if done >= self._total_s:
                left = "longer than planned"
            if self._bar is None:
                print(f"  {self._what:<44} {left}", file=sys.stderr, flush=True)
                continue
            self._bar.n = min(done, self._total_s)
            self._bar.set_description_str(self._what, refresh=False)
            self._bar.set_postfix_str(left, refresh=False)
            self._bar.refresh()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def tqdm_for_terminal() -> Any:
    """tqdm's class, if standard error is a terminal and tqdm is installed; else None."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    return tqdm


def progress(runs: Sequence[str]) -> Progress:
    """Bars if standard error is a terminal and tqdm is installed, else lines."""
    tqdm = tqdm_for_terminal()
    return Lines() if tqdm is None else Bars(runs, tqdm)
