"""The server: tables and clocks."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from trireme._C import PsOptions, PsServer
from trireme._core.durations import LONGEST_WAIT
from trireme._core.farewell import call_at_the_end, failure_of
from trireme._core.group_communicator import communicator_of
from trireme.ps.areas import AREA
from trireme.ps.sparse import Sparse, SparseTable
from trireme.ps.tables import Dense, DenseTable

Table = DenseTable | SparseTable

MODES = ("bsp", "ssp", "async")
_open_servers: weakref.WeakSet[ParameterServer] = weakref.WeakSet()


class ParameterServer:
    """Keeps tables that workers pull and push, each at its own pace.

    The ranks of a host share its memory, and that memory is the server: workers apply what is
    pushed themselves. On several hosts each keeps a share of every table, which workers of other
    hosts reach by a rank that serves there. A worker's clock is the number of its ``clock()``
    calls.

    * ``bsp``: pushes of a clock are kept apart by worker; when all have clocked it they are added
      in the order of worker numbers, divided by their number, and the optimizer makes one step. A
      pull at clock c returns the result of c steps. With ``backup=k`` a clock is committed
      without the last k workers, whose pushes for it are dropped.
    * ``ssp``: each push is a step of its own. A pull at clock c waits until the slowest worker has
      clock >= c - staleness.
    * ``async``: as ssp, and a pull never waits.

    Collective; nothing afterwards is, but ``trireme.writing()``.

    Any thread of a process may use it and its tables. They take turns, share the clock, and what
    they push adds up. A thread that waits for other workers lets the others in, but in ``save()``,
    ``load()`` and ``writing()``.

    Args:
        tables: the same on all ranks; worker 0's values count.
        servers: how many of the last ranks only serve, or which; they call ``serve()``. On several
            hosts there is one on each.
        timeout: of one wait, in seconds; by default that of the group.
        on_worker_loss: "raise": who waits, or pulls next, raises when a worker has died, or a rank
            that only serves; "continue": the others go on without it. On several hosts a server
            that has died is fatal under both, for its share is gone.

    Raises:
        ValueError: on all ranks, where tables or options differ or are out of range, where ranks
            do not share the memory of their host, or where a host of several has no rank that
            serves.
    """

    def __init__(
        self,
        tables: Sequence[Dense | Sparse],
        *,
        mode: str = "bsp",
        staleness: int = 0,
        backup: int = 0,
        servers: int | Sequence[int] = 0,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        on_worker_loss: str = "raise",
    ) -> None:
        group = AREA.expect_group(group, "Make the server on ranks of the group only.")
        for table in tables:
            AREA.expect(
                "a table", table, (Dense, Sparse), "ps.Dense or ps.Sparse",
                next_step="Describe it by one of them.",
            )  # fmt: skip
        options = PsOptions()
        for name, value in (("staleness", staleness), ("backup", backup)):
            AREA.expect(name, value, int, "an int", next_step="Count clocks, or workers.")
        options.staleness, options.backup = staleness, backup
        options.set_mode(_place_in(MODES, "mode", mode))
        if isinstance(servers, int):
            options.set_servers(servers, [])
        else:
            options.set_servers(0, list(servers))
        if timeout is not None:
            AREA.expect("timeout", timeout, (int, float), "seconds", next_step="Pass a number.")
            options.timeout = timedelta(seconds=min(timeout, LONGEST_WAIT.total_seconds()))
        if _place_in(("raise", "continue"), "on_worker_loss", on_worker_loss) == 1:
            options.go_on_after_losses()
        specs = [table._to_core() for table in tables]
        modules = {spec.name: spec.module for spec in tables if isinstance(spec, Dense)}
        self._adopt(PsServer(communicator_of(group), specs, options), modules, group)

    def _adopt(
        self,
        core: PsServer,
        modules: Mapping[str, nn.Module | None],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._core = core
        self._group = group
        self._process = os.getpid()
        self._tables = {name: self._table_of(name, modules) for name in core.table_names}
        _open_servers.add(self)
        call_at_the_end(_close_all)

    def _table_of(self, name: str, modules: Mapping[str, nn.Module | None]) -> Table:
        if self._core.is_sparse(name):
            return SparseTable(name, self._core.sparse(name), self._group)
        return DenseTable(name, self._core.dense(name), modules.get(name), self._group)

    @property
    def worker(self) -> int | None:
        """The number of this worker; None on a rank that only serves."""
        return self._core.worker

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self._core.workers

    def __getitem__(self, name: str) -> Table:
        if name not in self._tables:
            known = ", ".join(f"'{table}'" for table in self._tables)
            got = f"got table '{name}', expected one of {known}"
            AREA.refuse(got, "Ask for a table of the server.", self._group, kind=KeyError)
        return self._tables[name]

    def clock(self) -> int:
        """Ends this worker's clock; returns the number of the next one.

        Raises:
            RuntimeError: the module of a table has other parameters than when it was made.
        """
        for table in self._tables.values():
            table.expect_parameters()
        return self._core.clock()

    def clocks(self) -> list[int]:
        """The clock of each worker; of one that is gone its last."""
        return self._core.clocks()

    def stats(self) -> dict[str, Any]:
        """How the workers do: ``clocks``, who is ``slowest``, who has ``left`` or was ``lost``,
        seconds ``waited_s`` by cause, ``torn`` blocks in which workers have died, ``memory_bytes``
        and ``rows`` of all tables; and of this worker ``pulls``, ``pushes``, those ``dropped``
        because they came for a committed clock, ``bytes_pulled`` and ``bytes_pushed``. Any thread
        may call it."""
        return self._core.stats()

    def serve(self) -> None:
        """On a rank that only serves: returns when all workers have left, raises when one has
        died. On one host there is nothing to do meanwhile; on several hosts it does what workers
        of other hosts ask for."""
        self._core.serve()

    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False) -> None:
        """Saves all tables, with the states of their optimizers and the buffers of modules.

        Called on all workers that are there, under bsp at one clock; the first of them writes, with
        the files of ``trireme.save_checkpoint``, so that ``trireme.load_checkpoint`` loads the
        values of a dense table into every other strategy. Pushes of the open clock are not in it.

        Raises:
            ValueError: workers are at different clocks, or what ``save_checkpoint`` refuses;
                ``asynchronous``: pushes write the tables at any time.
            torch.distributed.DistBackendError: a worker does not come, or the first one could not.
        """
        if asynchronous:
            AREA.refuse(
                "got asynchronous=True, expected a synchronous save: pushes write tables any time",
                "Leave it out.",
            )
        for table in self._tables.values():
            table.expect_buffers()
        self._core.save(os.fspath(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads what a server of the same tables has saved, under any number of workers.

        Collective over all ranks, before ``serve()``, at one clock. Clocks go on from where they
        are; learning rates are those of the checkpoint. ``pull()`` before the next
        forward. Pushes of the open clock are dropped.

        Raises:
            ValueError: the checkpoint is of other tables, is not whole, or workers are at different
                clocks. A failure while it reads leaves tables half read.
        """
        for table in self._tables.values():
            table.expect_buffers()
        self._core.load(os.fspath(path))

    def accept(self, store: dist.Store) -> None:
        """Leaves in a Store where the tables are, for processes that call ``ps.join(store)``.

        Returns at once. Who joins is a process of this host and this user, and finds the tables as
        long as this process lives; what has joined then stays. A Store holds one such word: give
        each server a Store, or a ``PrefixStore``, of its own.

        Raises:
            RuntimeError: this host lets no process open the memory of another.
            torch.distributed.DistBackendError: the Store failed.
        """
        self._core.accept(store)

    def leave(self) -> None:
        """Says that nobody has to wait for this worker any more; pushes of its open clock are
        dropped. Modules get memory of their own."""
        try:
            self._core.leave()
        finally:  # what a signal handler raises ends no more than a wait
            self._release_modules()

    def close(self, error: str = "") -> None:
        """Leaves, for good. ``error`` is what has ended this worker: then the others raise. Not
        collective; again it does nothing. What a signal handler raises meanwhile, as Ctrl-C does,
        comes out once all is closed. Threads that wait for other workers raise RuntimeError."""
        try:
            self._core.close(error)
        finally:
            self._release_modules()

    def _release_modules(self) -> None:
        for table in self._tables.values():
            table.release_module()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failure_of(error))


def join(store: dist.Store) -> ParameterServer:
    """Takes part in a server of this host whose ``accept(store)`` has left word in a Store, for
    which it waits as long as the Store's timeout.

    The process becomes the next worker, at the clock of the slowest one; at most 64 join. It needs
    no group, so ``load()`` and ``serve()`` are refused. The module of a table is in other
    processes: here every dense table is one of tensors, which ``pull()`` returns by name.

    Raises:
        ValueError: no more workers can join; the server is on another host, or of another build of
            Trireme.
        torch.distributed.DistBackendError: the Store failed, or the memory cannot be opened: the
            process that called ``accept()`` has ended, say.
    """
    server = ParameterServer.__new__(ParameterServer)
    server._adopt(PsServer.join(store), {}, None)
    return server


def _place_in(names: Sequence[str], what: str, got: str) -> int:
    if got not in names:
        expected = ", ".join(repr(name) for name in names)
        AREA.refuse(f"got {what}={got!r}, expected one of {expected}", "Pass one of these.")
    return list(names).index(got)


def _close_all(error: str) -> None:
    with contextlib.ExitStack() as closing:  # all of them, also where one raises
        for server in list(_open_servers):
            if server._process == os.getpid():
                closing.callback(server.close, error)
