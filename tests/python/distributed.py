"""Runs a function on several ranks, each a process of its own, and brings back what they return."""

import contextlib
import ctypes
import faulthandler
import io
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a server that has imported torch and started nothing: 0.1 s per rank, where
# a spawned interpreter imports torch for seconds, and what a first step imports for more.
PROCESSES = multiprocessing.get_context("forkserver")
_preloaded = [
    *("torch", "torch._dynamo", "torch.distributed.optim", "torch.distributed.pipelining"),
    *("trireme", "trireme.dp", "trireme.fsdp", "trireme.zero", "safetensors.torch", "pytest"),
]
PROCESSES.set_forkserver_preload(_preloaded)
# pytest-xdist forbids its workers, and so this server, to write bytecode: each rank would compile
# the file of its test, and what that imports, anew.
sys.dont_write_bytecode = False

_GRACE = 3.0  # seconds for further failures to come in after the first

_LAUNCH_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "TRIREME_INIT_METHOD"),
)
_LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "MV2_", "TORCHELASTIC_")


class RankFailed(Exception):
    """Which rank failed first, and its traceback; then those that followed within _GRACE."""

    def __init__(self, failures: dict[int, str]) -> None:
        texts = [f"rank {rank} failed:\n{text}" for rank, text in failures.items()]
        super().__init__("\n".join(texts))
        self.rank, self.text = next(iter(failures.items()))


def preload(*modules: str) -> None:
    """Lets the server import these, too, if they are there; called before it is started."""
    _preloaded.extend(modules)
    PROCESSES.set_forkserver_preload(_preloaded)


@dataclass
class _Outcome:
    """What a rank sends: its result as bytes of torch.save, or a traceback and when it arose."""

    result: bytes | None = None
    error: str | None = None
    at: float = -math.inf


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection
    stacks: Path
    outcome: _Outcome | None = field(default=None)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    dying: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``world`` processes and return the results by rank.

    ``fn`` is a function of a module (it is pickled) and finds torchrun's variables set, with a
    Store that this process serves, so that no port has to be guessed and the death of rank 0 does
    not take the Store along; ``env`` overrides them. Each rank computes with one thread unless it
    sets another number. Results may hold tensors.

    Raises:
        RankFailed: a rank raised, or died without being in ``dying`` (whose result is None). Ranks
            that have not ended three seconds later are killed.
        TimeoutError: not all ranks ended within ``timeout`` seconds; with the stack of each.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(world):
                variables = {**torchrun_variables(number, world, store.port), **(env or {})}
                ranks.append(_start(fn, number, args, variables, Path(folder)))
            _collect(ranks, time.monotonic() + timeout, dying)
            return [_result(rank) for rank in ranks]
        finally:
            for rank in ranks:
                _end(rank)


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


def _start(
    fn: Callable[..., Any], number: int, args: Any, variables: dict[str, str], folder: Path
) -> _Rank:
    pipe, far_end = PROCESSES.Pipe(duplex=False)
    stacks = folder / f"stacks_{number}"
    process = PROCESSES.Process(
        target=_rank_main,
        args=(far_end, stacks, variables, fn, number, args),
        name=f"rank {number}",
    )
    process.start()
    far_end.close()  # the rank holds the only other end: its death is the end of the pipe
    return _Rank(number, process, pipe, stacks)


def _rank_main(
    pipe: Connection,
    stacks: Path,
    variables: dict[str, str],
    fn: Callable[..., Any],
    number: int,
    args: Any,
) -> None:
    os.setpgid(0, 0)  # so that what the rank starts can be killed with it
    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG: not even a killed pytest leaves us
    faulthandler.register(signal.SIGUSR1, stacks.open("w"))
    clean = without_launcher(os.environ)
    os.environ.clear()
    os.environ.update({**clean, **variables})
    torch.set_num_threads(1)
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        buffer = io.BytesIO()
        torch.save(fn(number, *args), buffer)
        outcome = _Outcome(result=buffer.getvalue())
    except BaseException:
        at = time.monotonic()  # one clock for all processes
        outcome = _Outcome(error=traceback.format_exc(), at=at)
    pipe.send(outcome)
    pipe.close()


def _collect(ranks: list[_Rank], deadline: float, dying: Collection[int]) -> None:
    while running := [rank for rank in ranks if rank.outcome is None]:
        ready = wait([rank.pipe for rank in running], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in running:
            if rank.pipe in ready:
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


def _receive(rank: _Rank, dying: Collection[int]) -> _Outcome:
    try:
        return rank.pipe.recv()
    except EOFError:
        rank.process.join(5)
        if rank.number in dying:
            return _Outcome()
        return _Outcome(error=f"ended with exit code {rank.process.exitcode} and without a result")


def _result(rank: _Rank) -> Any:
    if rank.outcome.result is None:
        return None
    return torch.load(io.BytesIO(rank.outcome.result), weights_only=False)


def _stacks_of(ranks: list[_Rank]) -> str:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it may end at this very moment
            os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    sizes: list[int] = []
    while time.monotonic() < deadline:  # until all have written, and write no more
        before, sizes = sizes, [rank.stacks.stat().st_size for rank in ranks]
        if sizes == before and all(sizes):
            break
        time.sleep(0.1)
    texts = [f"rank {rank.number} hangs in:\n{rank.stacks.read_text()}" for rank in ranks]
    return "\n".join(texts)


def _end(rank: _Rank) -> None:
    if rank.outcome is not None:
        rank.process.join(5)  # let it leave by itself: its destructors are part of the test
    try:
        os.killpg(rank.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        rank.process.kill()
    rank.process.join()
    rank.process.close()
    rank.pipe.close()
