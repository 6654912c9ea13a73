"""One collective timed on two backends in alternation, by ranks that hold a group of each.

Run as a rank (`python -m measure.collective_rounds CONFIG`) it measures once and replies.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measure.ranks import Launch, RankGroup
from measure.worker import take_over_stdout

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_BYTES_PER_BLOCK = 64 << 20
_MOST_CALLS = 200


@dataclass(frozen=True)
class CollectiveCase:
    """`bytes`: of the whole tensor on a rank: the input of a reduce_scatter, the output of an
    all_gather. fp32, synchronous calls through torch.distributed."""

    operation: str
    bytes: int
    world: int
    rounds: int


@dataclass(frozen=True)
class CollectiveTimes:
    """Microseconds per call, of the slowest rank, one entry per round; side by side."""

    ours: list[float]
    gloo: list[float]
    copy: list[float]
    """all ranks copy that many bytes at once"""
    in_place: list[float]
    """all ranks read and write that many bytes in place at once"""


def measure_collective(case: CollectiveCase) -> CollectiveTimes:
    """Measures `case` in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch(
            "collectives",
            "measure.collective_rounds",
            json.dumps(asdict(case)),
            case.world,
            1,
            Path(scratch),
        )
        with RankGroup(launch) as group:
            replies = group.replies()
    slowest = {
        name: [max(times) for times in zip(*(r[name] for r in replies), strict=True)]
        for name in replies[0]
    }
    return CollectiveTimes(**slowest)


def _call_of(case: CollectiveCase, group: Any) -> Callable[[], object]:
    whole = torch.zeros(case.bytes // 4)
    part = torch.zeros(max(1, case.bytes // 4 // case.world))
    if case.operation == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if case.operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if case.operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.broadcast(whole, 0, group=group)


def _time_us(call: Callable[[], object], calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def _measure(case: CollectiveCase) -> CollectiveTimes:
    ours = dist.new_group(backend="trireme")
    source = torch.zeros(case.bytes // 4)
    target = torch.zeros_like(source)
    sides: list[tuple[str, Callable[[], object]]] = [
        ("ours", _call_of(case, ours)),
        ("gloo", _call_of(case, dist.group.WORLD)),
        ("copy", lambda: target.copy_(source)),
        ("in_place", lambda: source.mul_(1.0)),
    ]
    calls = max(3, min(_MOST_CALLS, _BYTES_PER_BLOCK // case.bytes))
    found: dict[str, list[float]] = {name: [] for name, _ in sides}
    for _, call in sides:
        _time_us(call, 3)
    for number in range(case.rounds):
        for name, call in sides if number % 2 == 0 else list(reversed(sides)):
            found[name].append(_time_us(call, calls))
    return CollectiveTimes(**found)


def main() -> None:
    """Measures what the first argument says and sends the times to the launcher."""
    replies = take_over_stdout()
    import trireme  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times = _measure(CollectiveCase(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(times)), file=replies)
    sys.stdin.readline()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
