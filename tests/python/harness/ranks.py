"""Runs a function on several ranks, each in a process of its own, and brings back what they return.

Ranks are kept: the next case runs in the same processes, in a new group. Those of a case that has
failed are ended, and what a case has left behind is a failure. With TRIREME_TEST_FRESH_RANKS=1 each
case has processes of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from harness.processes import Outcome, TestProcess, torchrun_variables

_GRACE = 3.0  # seconds for further failures to come in after the first
_FRESH = os.environ.get("TRIREME_TEST_FRESH_RANKS", "0") != "0"

_idle: list[TestProcess] = []


class RankFailed(Exception):
    """Which rank failed first, and its traceback; then those that followed within _GRACE."""

    def __init__(self, failures: dict[int, str]) -> None:
        texts = [f"rank {rank} failed: {text}" for rank, text in failures.items()]
        super().__init__("\n".join(texts))
        self.rank, self.text = next(iter(failures.items()))


@dataclass
class _Rank:
    number: int
    process: TestProcess
    outcome: Outcome | None = field(default=None)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    dying: Collection[int] = (),
    fresh: bool = False,
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``world`` processes and return the results by rank.

    ``fn`` is a function of a module (it is pickled) and finds torchrun's variables set, with a
    Store that this process serves, so that no port has to be guessed and the death of rank 0 does
    not take the Store along; ``env`` overrides them. Each rank computes with one thread unless it
    sets another number. Results may hold tensors.

    The processes have run other cases and will run more. A case with ``env`` or ``dying``, or one
    that is ``fresh`` since it changes or measures its processes, has processes of its own.

    Raises:
        RankFailed: a rank raised, left something behind, died without being in ``dying`` (whose
            result is None), or did not end well after its result. Ranks that have not ended three
            seconds later are killed.
        TimeoutError: not all ranks ended within ``timeout`` seconds; with the stack of each.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    restores = not (fresh or env or dying)
    kept = restores and not _FRESH
    ranks = [_Rank(number, _process(kept)) for number in range(world)]
    passed = False
    codes: dict[int, int | None] = {}
    try:
        for rank in ranks:
            variables = {**torchrun_variables(rank.number, world, store.port), **(env or {})}
            rank.process.begin(variables, fn, (rank.number, *args), restores=restores)
        _collect(ranks, time.monotonic() + timeout, dying)
        results = [rank.outcome.value() for rank in ranks]
        passed = True
    finally:
        if passed and kept:
            _idle[:0] = [rank.process for rank in ranks]
        else:
            codes = {rank.number: _end(rank) for rank in ranks}
    wrong = {rank: code for rank, code in codes.items() if code != 0 and rank not in dying}
    if wrong:
        text = "ended with exit code {} after its result"
        raise RankFailed({rank: text.format(code) for rank, code in wrong.items()})
    return results


def _end(rank: _Rank) -> int | None:
    if rank.outcome is None:
        rank.process.kill()
        return None
    return rank.process.leave()


def _process(kept: bool) -> TestProcess:
    if not (kept and _idle):
        return TestProcess()
    process = _idle.pop(0)
    if process.has_ended():
        code = process.leave()
        raise AssertionError(
            f"a kept rank ended with exit code {code} before its next case, after {process.last}"
        )
    return process


def end_ranks() -> None:
    """Ends those that wait for another case."""
    while _idle:
        _idle.pop().leave()


# Before multiprocessing waits for processes that nobody has ended.
util.Finalize(None, end_ranks, exitpriority=100)


def _collect(ranks: list[_Rank], deadline: float, dying: Collection[int]) -> None:
    while running := [rank for rank in ranks if rank.outcome is None]:
        pipes = [rank.process.pipe for rank in running]
        ready = wait(pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in running:
            if rank.process.pipe in ready:
                rank.outcome = _receive(rank, dying)
        if any(rank.outcome and rank.outcome.error for rank in ranks):
            # The others may know of the failure before the rank that failed has reported it.
            deadline = min(deadline, time.monotonic() + _GRACE)
    failed = [rank for rank in ranks if rank.outcome and rank.outcome.error]
    if failed:
        failed.sort(key=lambda rank: rank.outcome.at)
        raise RankFailed({rank.number: rank.outcome.error for rank in failed})
    if running:
        raise TimeoutError(_stacks_of(running))


def _receive(rank: _Rank, dying: Collection[int]) -> Outcome:
    outcome = rank.process.outcome()
    if outcome is not None:
        return outcome
    if rank.number in dying:
        return Outcome()
    code = rank.process.exit_code
    return Outcome(error=f"ended with exit code {code} and without a result")


def _stacks_of(ranks: list[_Rank]) -> str:
    for rank in ranks:
        rank.process.ask_for_stacks()
    deadline = time.monotonic() + 5
    sizes: list[int] = []
    while time.monotonic() < deadline:  # until all have written, and write no more
        before, sizes = sizes, [len(rank.process.stacks()) for rank in ranks]
        if sizes == before and all(sizes):
            break
        time.sleep(0.1)
    texts = [f"rank {rank.number} hangs in:\n{rank.process.stacks()}" for rank in ranks]
    return "\n".join(texts)
