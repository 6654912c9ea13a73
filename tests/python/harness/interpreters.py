"""Programs as text that end as an interpreter does, in processes that begin with torch imported.

What they test is how a program ends: by an error, by sys.exit(), with threads at work. So they run
through all of the interpreter's own end, and of the C++ library's, unlike other forked programs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import ModuleType

from harness.processes import PROCESSES


class Interpreter:
    """Runs ``python -c TEXT ARGUMENT...``; what it prints and how it ends, as of a Popen."""

    def __init__(self, text: str, *arguments: object) -> None:
        reads, self_writes = os.pipe()
        self_reads, writes = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by communicate()
        # A Connection is what can be handed to a process of the server.
        ends = [Connection(reads), Connection(writes), Connection(os.dup(self._errors.fileno()))]
        given = (ends, dict(os.environ), textwrap.dedent(text), list(map(str, arguments)))
        self._process = PROCESSES.Process(target=_interpret, args=given, daemon=True)
        self._process.start()
        for end in ends:
            end.close()
        self.stdin = os.fdopen(self_writes, "w")
        self.stdout = os.fdopen(self_reads, "r")

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, given: str = "", timeout: float = 100) -> tuple[str, str]:
        """Gives it a text to read; returns all that it prints, to stdout and to stderr, and waits
        for its end."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        try:
            with self.stdin:
                self.stdin.write(given)
            with self.stdout:
                printed = self.stdout.read()
            self._process.join()
        finally:
            in_time = timer.is_alive()
            timer.cancel()
            timer.join()
        with self._errors:
            self._errors.seek(0)
            errors = self._errors.read().decode()
        if not in_time:
            raise subprocess.TimeoutExpired("an interpreter", timeout, printed, errors)
        return printed, errors

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        self._process.kill()


def run_interpreters(
    programs: Sequence[Interpreter], timeout: float = 100
) -> list[tuple[int | None, str, str]]:
    """Exit code, stdout and stderr of each, when all have ended."""
    try:
        said = [program.communicate(timeout=timeout) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [(program.returncode, *printed) for program, printed in zip(programs, said, strict=True)]


def _interpret(
    ends: Sequence[Connection], environment: Mapping[str, str], text: str, arguments: list[str]
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    code = 0
    try:
        exec(compile(text, "<string>", "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = 1
    ctypes.pythonapi.Py_Exit(code)
