"""The most memory that training ever takes on a host, and the widest model that fits a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from workloads import WorkloadOptions

from measure.fresh_run import starting_ranks
from measure.memory import written_mib
from measure.sides import Side

RANKS = 2
STEPS = 3  # whole gradients in the first backward, moments in the first step, then as ever
EVERY_S = 0.02


@dataclass
class Watch:
    """MiB of several processes together at their fullest moment, what they share counted once."""

    processes: Sequence[int]
    peak_mib: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Looks at once, every 20 ms, and once more behind `stop()`."""
        is_over = False
        while True:
            with suppress(OSError, KeyError):  # for a process that has just begun, or has ended
                self.peak_mib = max(self.peak_mib, sum(map(written_mib, self.processes)))
            if is_over:
                return
            is_over = self._over.wait(EVERY_S)

    def stop(self) -> None:
        self._over.set()


@contextmanager
def watching(processes: Sequence[int]) -> Iterator[Watch]:
    """A thread looks on until the context is left."""
    watch = Watch(processes)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        thread.join()


def measure_peak(side: Side, width: int) -> float:
    """Does what `measure_peak_of` does, for `mlp` with layers of this width."""
    return measure_peak_of(side, "mlp", WorkloadOptions(width=width))


def measure_peak_of(side: Side, workload: str, options: WorkloadOptions | None = None) -> float:
    """MiB that 2 ranks take at most while a workload is built and trained for 3 steps.

    Of the sum of PSS over the ranks, mapped files not counted, what they held before they built
    their model is taken off.
    """
    with starting_ranks(side, workload, RANKS, options) as group:
        with watching(group.processes) as watch:
            group.replies()
            group.ask({"do": "steps", "count": STEPS})
        held = [reply["memory"] for reply in group.ask({"do": "rest"})]
    return watch.peak_mib - sum(rank["at_start"] for rank in held)


@dataclass(frozen=True)
class Fitting:
    """`width` is the widest that fits, None if none does; `peaks` are MiB by width tried."""

    width: int | None
    peaks: dict[int, float]


def widest_fitting(
    peak_of: Callable[[int], float], limit_mib: float, widths: Sequence[int]
) -> Fitting:
    """Bisects `widths`, which grow, and of which a wider one takes more memory."""
    peaks: dict[int, float] = {}
    low, high = -1, len(widths)  # widths[low] fits, widths[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        peaks[widths[middle]] = peak_of(widths[middle])
        if peaks[widths[middle]] <= limit_mib:
            low = middle
        else:
            high = middle
    return Fitting(widths[low] if low >= 0 else None, dict(sorted(peaks.items())))
