"""A callee or a caller of ours is killed or stopped; how long until the other one knows.

Two ranks per trial, forked as those of measure/fault_trials.py: p0 remains, p1 is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from measure.fault_trials import lose_the_last
from measure.ranks import RankFailed

DEADLINE_S = 2.0  # ends the call during which the callee is stopped
CALLER_KILLED = "caller killed"
_PATIENCE_S = 30.0
_NAMES = ("p0", "p1")

Lose = Callable[[signal.Signals], None]


@dataclass(frozen=True)
class RemoteFault:
    """`seconds`: at most, to be in time. `says`: what the text has to have in it."""

    kind: str
    counted_from: str
    seconds: float
    says: str


FAULTS = (
    RemoteFault("callee killed in a forward", "the signal", 1.0, "p1 (rank 1)"),
    RemoteFault("callee killed in a backward", "the signal", 1.0, "p1 (rank 1)"),
    RemoteFault("callee killed between calls", "the next call", 1.0, "p1 (rank 1)"),
    RemoteFault("callee stopped in a method", "its call", DEADLINE_S + 1.0, "alive"),
    RemoteFault(CALLER_KILLED, "the signal", 2.0, ""),
)


@dataclass(frozen=True)
class Lost:
    """`seconds`: until the caller raised, or until the owner had freed what it kept. `raised` is
    the class of the exception and `text` the first line of what it said, if one was raised."""

    seconds: float
    raised: str
    text: str


def measure_remote_fault(fault: RemoteFault) -> Lost:
    """One trial in fresh processes. Raises RankFailed where the text does not say what it must."""
    lost, (reply,) = lose_the_last(_rank_main, fault.kind, len(_NAMES))
    if reply["problem"] or fault.says not in reply["text"]:
        got = reply["problem"] or f"{reply['text']!r}, expected {fault.says!r} in it"
        raise RankFailed(f"[remote_faults] {fault.kind}: got {got}")
    began = lost["at"] if fault.counted_from == "the signal" else reply["called_at"]
    first = reply["text"].strip().splitlines()[0] if reply["text"].strip() else ""
    return Lost(reply["known_at"] - began, reply["raised"], first)


def _rank_main(replies: Connection, kind: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), len(_NAMES))
    dist.init_process_group("trireme", store=store, rank=rank, world_size=len(_NAMES))

    def lose(number: signal.Signals) -> None:
        replies.send({"at": time.monotonic()})  # one clock for all processes
        os.kill(os.getpid(), number)
        threading.Event().wait()  # another thread may take the signal: this one must not go on

    from trireme import remote

    freed = _Freed()
    defined = _define(lose, freed)
    remote.start(_NAMES[rank])
    if rank == 0:
        if kind == CALLER_KILLED:
            replies.send(freed.reply())
        else:
            replies.send(_reply_of(_LAST_CALLS[kind](defined)))
    elif kind == CALLER_KILLED:
        _keep_and_die(defined, lose)
    threading.Event().wait()  # until this process is killed


# --- what is lost in a call ----------------------------------------------------------------------


class _Doomed(nn.Module):
    """Loses its process in its forward, or where the gradient of its result comes."""

    def __init__(self, where: str, lose: Lose) -> None:
        super().__init__()
        self._where, self._lose = where, lose

    def forward(self, x: Tensor) -> Tensor:
        if self._where == "forward":
            self._lose(signal.SIGKILL)
        y = x * 2
        y.register_hook(lambda _: self._lose(signal.SIGKILL))
        return y


def _define(lose: Lose, freed: _Freed) -> dict[str, Any]:
    """Tells what there is to call, the same in both ranks; returns it by name."""
    from trireme import remote

    def make_doomed(where: str) -> nn.Module:
        return _Doomed(where, lose)

    def make_kept() -> nn.Module:
        return _Kept(freed)

    def answer() -> int:
        return 1

    def die_soon() -> None:
        threading.Timer(0.2, lose, (signal.SIGKILL,)).start()

    class Observer(remote.Object):
        @remote.method
        def act(self) -> None:
            lose(signal.SIGSTOP)

    class Noted(remote.Object):
        def __init__(self) -> None:
            weakref.finalize(self, freed.note)

        @remote.method
        def touch(self) -> None:
            pass

    functions = [
        remote.function(function) for function in (make_doomed, make_kept, answer, die_soon)
    ]
    return {definition.__name__: definition for definition in (*functions, Observer, Noted)}


def _in_forward(defined: dict[str, Any]) -> Callable[[], object]:
    from trireme import remote

    net = remote.Module("p1", defined["make_doomed"], "forward")
    x = torch.ones(4, requires_grad=True)
    return lambda: net(x)


def _in_backward(defined: dict[str, Any]) -> Callable[[], object]:
    from trireme import remote

    net = remote.Module("p1", defined["make_doomed"], "backward")
    loss = net(torch.ones(4, requires_grad=True)).sum()
    return lambda: loss.backward()


def _between_calls(defined: dict[str, Any]) -> Callable[[], object]:
    from trireme import remote

    remote.call("p1", defined["answer"])
    remote.call("p1", defined["die_soon"])
    time.sleep(0.6)
    return lambda: remote.call("p1", defined["answer"])


def _stopped(defined: dict[str, Any]) -> Callable[[], object]:
    from trireme import remote

    observer = remote.create("p1", defined["Observer"])
    return lambda: observer.act(timeout=DEADLINE_S)


_LAST_CALLS = {
    "callee killed in a forward": _in_forward,
    "callee killed in a backward": _in_backward,
    "callee killed between calls": _between_calls,
    "callee stopped in a method": _stopped,
}


def _reply_of(last_call: Callable[[], object]) -> dict[str, Any]:
    called_at = time.monotonic()
    raised, text, problem = "", "", "no exception"
    try:
        last_call()
    except Exception as error:
        raised, text, problem = type(error).__name__, str(error), ""
    known_at = time.monotonic()
    times = {"called_at": called_at, "known_at": known_at}
    return {**times, "raised": raised, "text": text, "problem": problem}


# --- what a lost caller leaves behind ------------------------------------------------------------


class _Freed:
    """Notes when the owner frees what a caller had there: an object, and the graph of a forward."""

    EXPECTED = 2

    def __init__(self) -> None:
        self._noted = threading.Semaphore(0)

    def note(self) -> None:
        self._noted.release()

    def reply(self) -> dict[str, Any]:
        count = sum(self._noted.acquire(timeout=_PATIENCE_S) for _ in range(self.EXPECTED))
        problem = "" if count == self.EXPECTED else f"{count} of {self.EXPECTED} things freed"
        return {"known_at": time.monotonic(), "raised": "", "text": "", "problem": problem}


class _Token:
    """Lives as long as a graph."""


class _KeepsToken(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, token: _Token) -> Tensor:
        context.token = token
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Kept(nn.Module):
    """Each of its graphs is noted when it goes."""

    def __init__(self, freed: _Freed) -> None:
        super().__init__()
        self._freed = freed

    def forward(self, x: Tensor) -> Tensor:
        token = _Token()
        weakref.finalize(token, self._freed.note)
        kept: Tensor = _KeepsToken.apply(x, token)
        return kept


def _keep_and_die(defined: dict[str, Any], lose: Lose) -> None:
    from trireme import remote

    noted = remote.create("p0", defined["Noted"])
    noted.touch()
    net = remote.Module("p0", defined["make_kept"])
    kept = net(torch.ones(4, requires_grad=True))
    assert kept.requires_grad
    time.sleep(0.2)
    lose(signal.SIGKILL)
