"""Fresh ranks that measure a parameter server once and reply, all sides taking turns in them."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measure.ranks import Launch, RankGroup
from measure.worker import take_over_stdout

Call = Callable[[], object]
Times = dict[str, list[float]]


def ask_ranks(module: str, case: Any, world: int) -> Any:
    """What rank 0 of `python -m module CASE` replies; `case` is a dataclass, and each rank has one
    thread."""
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch("ps", module, json.dumps(asdict(case)), world, 1, Path(scratch))
        with RankGroup(launch) as group:
            return group.replies()[0]


def answer(measure: Callable[[dict[str, Any]], Any]) -> None:
    """Is the main() of such a module: replies with what `measure` makes of the case's fields."""
    replies = take_over_stdout()
    import trireme  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    dist.init_process_group("trireme")
    found = measure(json.loads(sys.argv[1]))
    print(json.dumps(found), file=replies)
    sys.stdin.readline()
    dist.barrier()
    dist.destroy_process_group()


def time_in_turns(names: Sequence[str], own: Mapping[str, Call], calls: int, rounds: int) -> Times:
    """Microseconds per call by side, one entry per round; odd rounds are reversed. Collective: a
    rank that has nothing to do for a side waits until the others have done it."""
    found: Times = {name: [] for name in names}
    for name in names:
        _time_us(own.get(name), min(calls, 3))
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(_time_us(own.get(name), calls))
    return found


def _time_us(call: Call | None, calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    if call is not None:
        for _ in range(calls):
            call()
    took = (time.perf_counter() - start) / calls * 1e6
    dist.barrier()
    return took
