"""One rank of a few is killed or stopped; how long until all others have raised.

Ranks are forked from a server that has imported torch, so that a trial takes no seconds to start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measure.ranks import RankFailed

KINDS = ("killed before", "killed inside", "killed after", "stopped before")
DEADLINE_S = 2.0  # for the group in which a rank is stopped
_PATIENCE_S = 60.0
_NUMEL = 6_553_600  # 25 MiB of fp32

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["trireme", "torch._dynamo", "torch.distributed.optim", "measure.strategies"]
)


@dataclass(frozen=True)
class FaultCase:
    """`kind`: what happens to the last rank, and when, seen from an all-reduce of 25 MiB.

    killed before    the others wait in it already; counted from the signal
    killed inside    all are in one after the other; counted from the signal
    killed after     it is done and the others compute; counted from when they call the next
    stopped before   the group's deadline is DEADLINE_S; counted from when the others call it
    """

    kind: str
    world: int


def measure_fault(case: FaultCase) -> float:
    """Milliseconds until the last of the others has raised, naming the rank; in fresh processes."""
    began, replies = lose_the_last(_rank_main, case, case.world)
    victim = f"rank {case.world - 1} (process"
    for rank, reply in enumerate(replies):
        if victim not in reply["text"]:
            raise RankFailed(f"[faults] rank {rank} got {reply['text']!r}, expected {victim} ...")
    if case.kind in ("killed after", "stopped before"):
        began["at"] = min(reply["called_at"] for reply in replies)
    return (max(reply["raised_at"] for reply in replies) - began["at"]) * 1e3


def lose_the_last(
    rank_main: Callable[[Connection, Any, int, str], None], case: object, world: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs ``rank_main(replies, case, rank, folder)`` in so many processes. Returns what the last
    rank has sent before it was lost, and what each of the others has sent then."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        ends, ranks = [], []
        for rank in range(world):
            end, far_end = PROCESSES.Pipe(duplex=False)
            process = PROCESSES.Process(target=rank_main, args=(far_end, case, rank, folder))
            process.start()
            far_end.close()
            ends.append(end)
            ranks.append(process)
        try:
            began = receive(ends[-1], world - 1)
            return began, [receive(end, rank) for rank, end in enumerate(ends[:-1])]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def receive(end: Connection, rank: int) -> dict[str, Any]:
    if not end.poll(_PATIENCE_S):
        raise RankFailed(f"[faults] rank {rank} said nothing for {_PATIENCE_S:g} s, not a word")
    try:
        reply: dict[str, Any] = end.recv()
    except EOFError as error:
        raise RankFailed(f"[faults] rank {rank} ended without a word, expected one") from error
    return reply


def _rank_main(replies: Connection, case: FaultCase, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "trireme",
        store=dist.FileStore(str(Path(folder, "store")), case.world),
        rank=rank,
        world_size=case.world,
        timeout=timedelta(seconds=DEADLINE_S if case.kind == "stopped before" else 600),
    )
    tensor = torch.zeros(_NUMEL)
    for _ in range(3):
        dist.all_reduce(tensor)
    if rank == case.world - 1:
        _be_lost(replies, case.kind, tensor)
    if case.kind == "killed after":
        time.sleep(0.3)
    called_at = time.monotonic()
    try:
        while True:
            dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        raised_at = time.monotonic()
        replies.send({"called_at": called_at, "raised_at": raised_at, "text": str(error)})


def _be_lost(replies: Connection, kind: str, tensor: torch.Tensor) -> None:
    def lose(number: signal.Signals) -> None:
        replies.send({"at": time.monotonic()})  # one clock for all processes
        os.kill(os.getpid(), number)

    if kind == "killed inside":
        threading.Timer(0.2, lose, (signal.SIGKILL,)).start()
        while True:
            dist.all_reduce(tensor)
    if kind in ("killed before", "stopped before"):
        time.sleep(0.2)
    lose(signal.SIGSTOP if kind == "stopped before" else signal.SIGKILL)
