"""The processes of one strategy, started like torchrun starts them and steered by lines of JSON.

A rank sleeps in a read of its standard input until a command comes, so that several groups can live
side by side and only one of them computes. Its standard output carries the replies; everything that
it prints goes to a log.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch.distributed as dist

Message = dict[str, Any]
BENCHMARKS = Path(__file__).resolve().parents[1]
REPLY_LIMIT_S = 600.0
LAST_WORDS_S = 2.0
DYING_S = 30.0  # on a busy host a rank has closed its pipe long before it has ended
LAST_WORDS_LINES = 12


class RankFailed(RuntimeError):
    """A rank died or did not answer; the text ends with the last lines that it printed."""


@dataclass(frozen=True)
class Launch:
    """Runs `python -m module argument` once per rank; logs go to `log_folder/name.rank.log`."""

    name: str
    module: str
    argument: str
    world: int
    threads: int
    log_folder: Path


class RankGroup:
    """Starts `launch.world` processes; leaving the context ends them."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._logs = [launch.log_folder / f"{launch.name}.{r}.log" for r in range(launch.world)]
        # Served here: a port that was only found free may be taken until a rank has imported torch.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = str(self._store.port)
        self._ranks = [self._start(rank, port) for rank in range(launch.world)]
        self._unread = [b""] * launch.world

    @property
    def processes(self) -> list[int]:
        """Their ids, in rank order."""
        return [process.pid for process in self._ranks]

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._send({"do": "stop"})
            for rank in self._ranks:
                try:
                    rank.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    rank.kill()
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def ask(
        self, command: Message, on_tick: Callable[[Message], None] | None = None
    ) -> list[Message]:
        """Sends `command` to all ranks and returns their replies in rank order."""
        self._send(command)
        return self.replies(on_tick)

    def replies(self, on_tick: Callable[[Message], None] | None = None) -> list[Message]:
        """One reply per rank, in rank order. Messages with a `tick` go to `on_tick` meanwhile.

        Raises RankFailed if a rank ends before it has answered, or after ten silent minutes.
        """
        answers: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._ranks):
                selector.register(_pipe(process.stdout), selectors.EVENT_READ, rank)
            while len(answers) < self.launch.world:
                events = selector.select(REPLY_LIMIT_S)
                if not events:
                    self._fail(f"did not answer within {REPLY_LIMIT_S:.0f} s")
                for key, _ in events:
                    for message in self._read(key.data):
                        if "tick" not in message:
                            answers[key.data] = message
                        elif on_tick is not None:
                            on_tick(message)
        return [answers[rank] for rank in range(self.launch.world)]

    def _start(self, rank: int, port: str) -> subprocess.Popen[bytes]:
        world = str(self.launch.world)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": str(self.launch.threads),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        with open(self._logs[rank], "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self.launch.module, self.launch.argument],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # an interrupt reaches the ranks through us, not twice
            )

    def _send(self, command: Message) -> None:
        line = (json.dumps(command) + "\n").encode()
        for process in self._ranks:
            try:
                _pipe(process.stdin).write(line)
                _pipe(process.stdin).flush()
            except BrokenPipeError:
                self._fail("ended")

    def _read(self, rank: int) -> list[Message]:
        chunk = os.read(_pipe(self._ranks[rank].stdout).fileno(), 1 << 16)
        if not chunk:
            self._fail("ended")
        *lines, self._unread[rank] = (self._unread[rank] + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def _dead(self) -> list[int]:
        return [r for r, process in enumerate(self._ranks) if process.poll() is not None]

    def _fail(self, what: str) -> None:
        """Raises with the last words of all dead ranks; peers get a moment to follow the first."""
        deadline = time.monotonic() + (DYING_S if what == "ended" else 0.0)
        while not self._dead() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(LAST_WORDS_S)
        dead = self._dead()
        words = [f"rank {r} printed last:\n{_tail(self._logs[r])}" for r in dead]
        name, world = self.launch.name, self.launch.world
        raise RankFailed(
            f"[ranks] {name}: got no reply because a rank {what} (dead: {dead} of {world}), "
            "expected one from each. " + "\n".join(words)
        )


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # opened with PIPE
    return stream


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LAST_WORDS_LINES:]
    return "\n".join(f"  {line}" for line in lines)
