"""Several threads of a worker use its server: the user's own, rows of a pipeline, replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from trireme import ps

from harness.faults import raises
from harness.meeting import say, stay_until
from harness.on_ranks import AGES_S, on_shm_ranks
from parameter_server.hosts import WORKERS, Run, work

DIM = 8
IDS = 50
NUMEL = 40_000  # more than a block
THREADS = 4
PUSHES = 25


def tables(worker: int | None = None) -> list[Any]:
    return [
        ps.Sparse("rows", DIM, optimizer=ps.Sum(), reduction="sum"),
        ps.Dense("dense", {"x": torch.zeros(NUMEL)}, optimizer=ps.Sum(), reduction="sum"),
    ]


def on_threads(program: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Begins at once on all of them; returns what they return."""
    begin = threading.Barrier(threads)

    def run(thread: int) -> Any:
        begin.wait()
        return program(thread)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


def push_ones(server: ps.ParameterServer, thread: int) -> None:
    """One to every row and element in each push; threads have their ids in different orders."""
    order = torch.Generator().manual_seed(thread)
    rows, dense = server["rows"], server["dense"]
    for push in range(PUSHES):
        ids = torch.randperm(IDS, generator=order)
        rows.push(ids, torch.ones(IDS, DIM), async_op=push % 2 == 1)
        assert rows.pull(ids).shape == (IDS, DIM)
        dense.push({"x": torch.ones(NUMEL)}, async_op=push % 2 == 0)
        if push % 5 == 0:
            assert rows.pull(ids, async_op=True).wait().shape == (IDS, DIM)
            assert len(rows) <= IDS and server.stats()["pushes"] > 0
            assert dense.pull()["x"].shape == (NUMEL,)


def add_up(server: ps.ParameterServer, workers: int, meet: Callable[[], Any]) -> None:
    on_threads(lambda thread: push_ones(server, thread))
    server.clock()
    meet()
    expected = workers * THREADS * PUSHES
    assert (server["rows"].pull(torch.arange(IDS)) == expected).all()
    assert (server["dense"].pull()["x"] == expected).all()
    assert server.stats()["pushes"] == 2 * THREADS * PUSHES


@pytest.mark.parametrize("mode", ps.server.MODES)
@on_shm_ranks(2)
def test_nothing_that_threads_push_is_lost(rank: int, mode: str) -> None:
    with ps.ParameterServer(tables(), mode=mode, staleness=int(mode == "ssp")) as server:
        add_up(server, 2, dist.barrier)


def adds_up_over_hosts(server: ps.ParameterServer) -> None:
    add_up(server, WORKERS, lambda: None)


def test_nothing_is_lost_over_hosts() -> None:
    work("2+3", Run(tables, adds_up_over_hosts))


class Rows(nn.Module):
    """Adds the sums of rows to the second half of what comes; the first half are their ids."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, both: Tensor) -> Tensor:
        ids, sums = both.chunk(2, 1)
        rows = self.rows(ids.long()).view(len(ids), -1)
        return torch.cat([ids, sums + rows.sum(1, keepdim=True)], 1)


def through_pipeline(net: nn.Module) -> nn.Module:
    return trireme.Pipeline(net, chunks=8, devices=["cpu"] * 2)


def through_replicas(net: nn.Module) -> nn.Module:
    return trireme.DataParallel(net, replicas=2)


@pytest.mark.parametrize("made_of", [through_pipeline, through_replicas])
@on_shm_ranks(1)
def test_rows_in_threads_of_the_project(rank: int, made_of: Callable[..., nn.Module]) -> None:
    """Each element of the second half gives each row of its sample a one, in both layers."""
    ids = torch.arange(64 * 4).view(64, 4) * 7 % IDS
    inputs = torch.cat([ids, torch.zeros(64, 4)], 1)
    expected = 20 * 2 * 4 * torch.bincount(ids.flatten(), minlength=IDS)
    for mode in ("bsp", "async"):
        with ps.ParameterServer(tables(), mode=mode) as server:
            table = server["rows"]
            bag, embedding = ps.EmbeddingBag(table, mode="sum"), ps.Embedding(table)
            net = made_of(nn.Sequential(Rows(bag), Rows(embedding)))
            for _ in range(20):
                net(inputs).sum().backward()
            server.clock()
            found = table.pull(torch.arange(IDS))
            assert torch.equal(found, expected.float().unsqueeze(1).expand(IDS, DIM))


@on_shm_ranks(2, patience_s=AGES_S)
def test_who_waits_lets_the_others_in(rank: int) -> None:
    """Rank 1 clocks only when it has heard of what rank 0 does while threads of it wait."""
    with ps.ParameterServer(tables()) as server:
        rows, one, ids = server["rows"], torch.ones(1, DIM), torch.tensor([3])
        rows.push(ids, one)
        if rank == 1:
            stay_until("pushed")
            server.clock()
            stay_until("closed")
            return
        server.clock()
        pending = rows.pull(ids, async_op=True)
        waits = [lambda: rows.pull(ids), pending.wait, pending.wait, server["dense"].pull]
        with ThreadPoolExecutor(len(waits)) as pool:
            found = [pool.submit(wait) for wait in waits]
            rows.push(ids, one)
            server["dense"].push({"x": torch.ones(NUMEL)})
            assert server.stats()["clocks"] == [1, 0] and not pending.done()
            say("pushed")
            assert all((pull.result() == 2).all() for pull in found[:3])
        server.clock()
        # Nobody clocks any more: whoever waits does so until the server is closed.
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(rows.pull, ids), pool.submit(server["dense"].pull)]
            server.close()
            for pull in waiting:
                with raises(RuntimeError, "[ps] pull", "closed"):
                    pull.result()
        say("closed")


@on_shm_ranks(1)
def test_a_server_that_goes_waits_for_its_threads(rank: int) -> None:
    """A backward on another thread ends, or is told that the server is closed."""
    server = ps.ParameterServer(tables(), mode="async")
    embedding = ps.Embedding(server["rows"])
    told = []

    def train() -> None:
        try:
            while True:
                embedding(torch.arange(IDS)).sum().backward()
                begun.set()
        except RuntimeError as error:
            told.append(str(error))

    begun = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    begun.wait()
    del server
    thread.join()
    assert "closed" in told[0]
