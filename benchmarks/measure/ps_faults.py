"""A worker of a parameter server is killed or stopped; how long until the others know.

Ranks are forked as those of measure/fault_trials.py, and the last one is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measure.fault_trials import DEADLINE_S, lose_the_last
from measure.ranks import RankFailed

_NUMEL = 1 << 20  # 4 MiB of fp32


@dataclass(frozen=True)
class PsFault:
    """What happens to the last worker while the others wait for it in a pull.

    `says`: what each of them has to say of it; nothing where they go on without it.
    """

    kind: str
    counted_from: str
    says: str
    number: signal.Signals = signal.SIGKILL
    options: Mapping[str, Any] = field(default_factory=dict)


PS_FAULTS = (
    PsFault("killed, `bsp`", "the signal", "has died"),
    PsFault("killed, `ssp`", "the signal", "has died", options={"mode": "ssp"}),
    PsFault(
        "killed, `bsp`, left behind", "the signal", "", options={"on_worker_loss": "continue"}
    ),
    PsFault(
        "stopped, `bsp`", "the pull", "its process is stopped",
        signal.SIGSTOP, {"timeout": DEADLINE_S},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class _Case:
    fault: PsFault
    world: int


def measure_ps_fault(fault: PsFault, world: int) -> float:
    """Milliseconds until the last of the others has raised, naming the worker, or has pulled
    without it; in fresh processes."""
    lost, replies = lose_the_last(_rank_main, _Case(fault, world), world)
    victim = f"worker {world - 1} (rank {world - 1}, process"
    for rank, reply in enumerate(replies):
        text = reply["text"]
        if bool(text) != bool(fault.says) or (text and not (victim in text and fault.says in text)):
            expected = f"{victim} ... {fault.says}" if fault.says else "values"
            raise RankFailed(f"[ps_faults] rank {rank} got {text!r}, expected {expected}")
    from_signal = fault.counted_from == "the signal"
    began = lost["at"] if from_signal else min(reply["called_at"] for reply in replies)
    known: float = max(reply["known_at"] for reply in replies)
    return (known - began) * 1e3


def _rank_main(replies: Connection, case: _Case, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), case.world)
    dist.init_process_group("trireme", store=store, rank=rank, world_size=case.world)
    from trireme import ps

    spec = ps.Dense("t", {"x": torch.zeros(_NUMEL)}, optimizer=ps.SGD(0.1))
    server = ps.ParameterServer([spec], **case.fault.options)
    table, gradients = server["t"], {"x": torch.ones(_NUMEL)}
    for _ in range(3):
        table.pull()
        table.push(gradients)
        server.clock()
    table.pull()
    if rank == case.world - 1:
        time.sleep(0.2)  # the others are in their next pull
        replies.send({"at": time.monotonic()})  # one clock for all processes
        os.kill(os.getpid(), case.fault.number)
    else:
        table.push(gradients)
        server.clock()
        replies.send(_pull(table))
    threading.Event().wait()  # until this process is killed


def _pull(table: Any) -> dict[str, Any]:
    called_at, text = time.monotonic(), ""
    try:
        table.pull()
    except dist.DistBackendError as error:
        text = str(error)
    return {"called_at": called_at, "known_at": time.monotonic(), "text": text}
