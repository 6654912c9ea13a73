"""Programs in processes that begin with torch imported, in place of fresh interpreters.

A fresh interpreter takes four seconds of a core to import torch, and three more where torch makes
its first optimizer. Most tests train for less than one. So what is tested is forked from the server
of processes.py; the tests of launchers, and one run of each program, start as users do.
"""

import atexit
import ctypes
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from harness.processes import PROCESSES, torchrun_variables
from harness.ranks import run_ranks

ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
# With it glibc gives the memory of a tensor back when it is freed, and a program has the same peak
# in each run. By itself it keeps blocks below a size that grows with what was freed before.
SAME_PEAKS = {_MMAP_THRESHOLD: str(64 << 10)}
_M_MMAP_THRESHOLD = -3  # of <malloc.h>


def run_script(
    script: Path,
    ranks: int,
    *options: str,
    timeout: float = 100,
    env: Mapping[str, str] | None = None,
) -> str:
    """What so many ranks of a Python program print, one after the other.

    ``env`` comes on top of ``ON_CPU``, here and below.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = (str(script), options, folder)
        run_ranks(_script, ranks, *place, timeout=timeout, env={**ON_CPU, **(env or {})})
        return "".join((Path(folder) / str(rank)).read_text() for rank in range(ranks))


def run_command(
    command: Sequence[str],
    ranks: int,
    timeout: float = 100,
    env: Mapping[str, str] | None = None,
) -> str:
    """What so many ranks of another program print. Several are told what torchrun tells them."""
    return run_commands([command] * ranks, timeout, env)


def run_commands(
    commands: Sequence[Sequence[str]],
    timeout: float = 100,
    env: Mapping[str, str] | None = None,
) -> str:
    """The same for a program of each rank's own."""
    ranks = len(commands)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def launched(rank: int) -> dict[str, str]:
        return torchrun_variables(rank, ranks, store.port) if ranks > 1 else {}

    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ON_CPU, **(env or {}), **launched(rank)},
        )
        for rank, command in enumerate(commands)
    ]
    try:
        printed = [process.communicate(timeout=timeout) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(running, printed, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return "".join(output for output, _ in printed)


class ForkedPopen:
    """``subprocess.Popen`` of ``python -m MODULE ARGUMENT...``, as far as RankGroup needs it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: IO[bytes],
        start_new_session: bool,
    ) -> None:
        assert list(command[:2]) == [sys.executable, "-m"] and start_new_session
        assert stdin == stdout == subprocess.PIPE
        reads, self_writes = os.pipe()
        self_reads, writes = os.pipe()
        # A Connection is what can be handed to a process of the server.
        ends = (Connection(reads), Connection(writes), Connection(os.dup(stderr.fileno())))
        self._process = PROCESSES.Process(
            target=_module, args=(ends, dict(env), list(command[2:])), daemon=True
        )
        self._process.start()
        for end in ends:
            end.close()
        self.stdin = os.fdopen(self_writes, "wb")
        self.stdout = os.fdopen(self_reads, "rb")
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        self.stdin.close()
        self.stdout.close()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _script(rank: int, script: str, options: Sequence[str], folder: str) -> None:
    into = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(into, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    if os.environ["WORLD_SIZE"] == "1":  # then there is no launcher
        for name in torchrun_variables(0, 1, 0):
            os.environ.pop(name, None)
    threshold = os.environ.get(_MMAP_THRESHOLD)
    if threshold:  # glibc reads it when a program starts, which this one did before it was forked
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(threshold))
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


def _module(ends: Sequence[Connection], environment: dict[str, str], command: list[str]) -> Any:
    os.setsid()
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = command
    code: Any = 0
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
