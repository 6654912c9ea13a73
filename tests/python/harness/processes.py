"""Processes of the tests: forked with torch imported, and kept for one case after another.

A fresh interpreter takes four seconds of a core to import torch. Processes are forked from a server
that has imported it and started nothing, which takes 0.1 s, and run many cases, each within
milliseconds. After each, the process looks for what the case has left behind (leftovers.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import trireme
from tqdm import tqdm

PROCESSES = multiprocessing.get_context("forkserver")
_preloaded = [
    *("torch", "torch._dynamo", "torch.distributed.optim", "torch.distributed.pipelining"),
    *("trireme", "trireme.dp", "trireme.fsdp", "trireme.zero", "safetensors.torch", "pytest"),
    *("torch.testing", "harness.leftovers"),
]
PROCESSES.set_forkserver_preload(_preloaded)
# pytest-xdist forbids its workers, and so this server, to write bytecode: each rank would compile
# the file of its test, and what that imports, anew.
sys.dont_write_bytecode = False

_LAUNCH_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "TRIREME_INIT_METHOD"),
)
_LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "MV2_", "TORCHELASTIC_")


def preload(*modules: str) -> None:
    """Lets the server import these, too, if they are there; called before it is started."""
    _preloaded.extend(modules)
    PROCESSES.set_forkserver_preload(_preloaded)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables by which a launcher tells a process its place."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _LAUNCH_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }


def torchrun_variables(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@dataclass
class Outcome:
    """What a case came to: its result as bytes of torch.save; or the error, then its traceback, and
    when it arose."""

    result: bytes | None = None
    error: str | None = None
    at: float = -math.inf

    def value(self) -> Any:
        if self.result is None:
            return None
        return torch.load(io.BytesIO(self.result), weights_only=False)


class TestProcess:
    """A process that runs one case after another; it ends with its pipe, or when it is killed."""

    __test__ = False  # not a class of tests

    def __init__(self) -> None:
        self.pipe, far_end = PROCESSES.Pipe()
        handle, self._stacks = tempfile.mkstemp(prefix="stacks")
        os.close(handle)
        self._process: BaseProcess = PROCESSES.Process(
            target=_run_cases, args=(far_end, self._stacks)
        )
        self._process.start()
        self.last = "its start"
        far_end.close()  # the process holds the only other end: its death is the end of the pipe

    def begin(
        self, variables: Mapping[str, str], fn: Callable[..., Any], args: Any, *, restores: bool
    ) -> None:
        """Lets it call ``fn(*args)`` with these variables in its environment.

        A case that ``restores`` its process fails if it leaves something behind.
        """
        self.last = os.environ.get("PYTEST_CURRENT_TEST", repr(fn))
        call = bytes(ForkingPickler.dumps((fn, args)))
        self.pipe.send_bytes(pickle.dumps((dict(variables), restores, call)))

    def outcome(self) -> Outcome | None:
        """That of the case which it runs; waits for it. None if the process has died."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return None

    def has_ended(self) -> bool:
        """Asked between two cases, when it has nothing to say."""
        return self.pipe.poll()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def ask_for_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may end at this very moment
            os.kill(self._process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        """What it has written so far since it was asked."""
        return Path(self._stacks).read_text()

    def leave(self) -> int | None:
        """Lets it end by itself, and returns its exit code: what it does then is part of the test.

        None if it does not end within 5 s.
        """
        self.pipe.close()
        self._process.join(5)
        code = self._process.exitcode
        self.kill()
        return code

    def kill(self) -> None:
        """Ends it and what it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()
        os.unlink(self._stacks)


def _run_cases(pipe: Connection, stacks: str) -> None:
    os.setpgid(0, 0)  # so that what it starts can be killed with it
    # PR_SET_PDEATHSIG: not even a killed pytest leaves us
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, os.open(stacks, os.O_WRONLY))
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    clean = without_launcher(os.environ)
    trireme.get_logger()  # its handler stays from the first use on
    tqdm.monitor_interval = 0  # torch.export draws progress, and tqdm keeps a thread for that
    gc.freeze()  # what was imported before the fork: looking through it takes half a second
    goes_on = True
    things = None
    while goes_on:
        try:
            variables, restores, call = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        os.environ.clear()
        os.environ.update({**clean, **variables})
        outcome, things = _outcome_of(call, restores, things)
        # The other ranks see this one end if it has failed, or does not restore its process.
        goes_on = restores and not outcome.error
        pipe.send(outcome)


def _outcome_of(
    call: bytes, restores: bool, things: dict[str, Any] | None
) -> tuple[Outcome, dict[str, Any] | None]:
    """Runs a case; ``things`` are those that leftovers.expect() has found behind the one before.
    Returns its outcome, and those found behind it."""
    from harness import leftovers  # the server has imported it; pytest need not

    try:
        fn, args = pickle.loads(call)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        sys.excepthook = sys.__excepthook__  # a group of torch's wraps it, and leaves it so
        before = leftovers.look(things)
        buffer = io.BytesIO()
        with warnings.catch_warnings():  # torch's Join changes its filters
            torch.save(fn(*args), buffer)
        fn = args = None
        found = leftovers.expect(before) if restores else None
        return Outcome(result=buffer.getvalue()), found
    except BaseException as error:
        at = time.monotonic()  # one clock for all processes
        kind = traceback.format_exception_only(error)[-1].partition("\n")[0]
        return Outcome(error=f"{kind}\n{traceback.format_exc()}", at=at), None
