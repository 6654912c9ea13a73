"""What caller and callee hold after many calls of ours, and after forwards without a backward.

Run as a rank (`python -m measure.remote_memory CONFIG`) it measures once and replies. Rank 0 calls,
rank 1 serves.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measure import memory
from measure.ps_ranks import answer, ask_ranks
from measure.remote_calls import NAMES

Held = dict[str, dict[str, float]]  # MiB by process and kind

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class MemoryCase:
    """The warm-up has the hundredth part of the calls and of the forwards, but at least `least`.

    `settle_s`: how long the owner has to free what nobody refers to."""

    calls: int = 100_000
    forwards: int = 1_000
    width: int = 1024
    batch: int = 32
    least: int = 100
    settle_s: float = 2.5


@dataclass(frozen=True)
class HeldAfter:
    """Readings after warm-up, after the calls, and after the forwards."""

    warm_up: Held
    calls: Held
    forwards: Held


def measure_remote_memory(case: MemoryCase) -> HeldAfter:
    """The readings of fresh processes."""
    return HeldAfter(**ask_ranks("measure.remote_memory", case, len(NAMES)))


def held_here() -> dict[str, float]:
    """What this process holds, freed memory given back. `written`: without mapped files."""
    memory.give_back_unused()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    written = memory.without_files_mib(memory.resident_mib())
    return {"rss": resident * _PAGE / 2**20, "written": written}


class _Caller:
    """Calls, drops forwards, and reads what both processes hold."""

    def __init__(self, case: MemoryCase) -> None:
        from trireme import remote

        from measure.remote_modules import make_layer

        self._case = case
        self._net = remote.Module("callee", make_layer, case.width)
        self._x = torch.rand(case.batch, case.width, requires_grad=True)
        self._tensor = torch.zeros(1)

    def call(self, times: int) -> None:
        from trireme import remote

        from measure.remote_rpc import give_back

        for _ in range(times):
            remote.call("callee", give_back, self._tensor)

    def drop_forwards(self, times: int) -> None:
        for _ in range(times):
            self._net(self._x)

    def reading(self) -> Held:
        from trireme import remote

        time.sleep(self._case.settle_s)
        return {"caller": held_here(), "callee": remote.call("callee", held_here)}


def _readings(case: MemoryCase) -> dict[str, Held]:
    caller = _Caller(case)
    caller.reading()  # what a first reading imports and allocates is no growth
    caller.call(max(case.calls // 100, case.least))
    caller.drop_forwards(max(case.forwards // 100, case.least))
    found = {"warm_up": caller.reading()}
    caller.call(case.calls)
    found["calls"] = caller.reading()
    caller.drop_forwards(case.forwards)
    return {**found, "forwards": caller.reading()}


def measure(fields: dict[str, Any]) -> dict[str, Held]:
    """The readings of a case, on rank 0 of two."""
    from trireme import remote

    from measure.remote_modules import make_layer
    from measure.remote_rpc import give_back

    rank = dist.get_rank()
    for function in (give_back, make_layer, held_here):
        remote.function(function)
    remote.start(NAMES[rank])
    found = _readings(MemoryCase(**fields)) if rank == 0 else {}
    remote.stop()
    return found


if __name__ == "__main__":
    # The function that is called has to be the one that was registered.
    from measure.remote_memory import measure as measured

    answer(measured)
