"""The parameter server between hosts: each keeps a share of each table, and workers see one table.

Hosts are pretended by ``host_partition``. What one host computes is what any layout must compute.
"""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from trireme import ps

from harness.faults import raises
from harness.meeting import process_of, say, stay_until, store, until
from harness.models import mlp
from harness.pretended_hosts import LAYOUTS, on_hosts
from parameter_server.hosts import (
    COUNTED,
    DIM,
    ONE_HOST,
    SEVERAL_HOSTS,
    WORKERS,
    Run,
    Tables,
    all_kinds,
    assert_same,
    count,
    counted,
    counters,
    has_all,
    in_turn,
    made,
    meet,
    push_ones,
    rates,
    rows_of_all,
    tables_of_all_kinds,
    uniform_items,
    work,
)
from parameter_server.one_process import assert_close, batch, synchronous

SGD = ps.SGD(0.25)

# --- the bits of one host ------------------------------------------------------------------------

SAME_EVERYWHERE = (
    Run(tables_of_all_kinds, all_kinds),
    Run(tables_of_all_kinds, in_turn, options={"mode": "ssp"}),
    Run(uniform_items, rows_of_all, options={"mode": "async"}),
)


@pytest.fixture(scope="module")
def of_one_host() -> list[list[Any]]:
    return work(ONE_HOST, *SAME_EVERYWHERE)


@pytest.mark.parametrize("layout", SEVERAL_HOSTS)
def test_has_the_bits_of_one_host(layout: str, of_one_host: list[list[Any]]) -> None:
    for got, expected in zip(work(layout, *SAME_EVERYWHERE), of_one_host, strict=True):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)


# --- one process ---------------------------------------------------------------------------------


def pushed_by(worker: int, clock: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Whole numbers, in threes: gradients by name, and ids with theirs."""
    dense = {"cut": torch.full((40, 1000), 3.0 * (worker + clock + 1))}
    if clock % 2 == 0:
        dense["whole"] = torch.full((7,), 6.0 * worker - 3)
    ids = torch.tensor([[worker, clock], [5, worker]])
    return dense, ids, torch.full((2, 2, DIM), 6.0 * worker + 3 * clock)


class OneProcess:
    """Plain torch on the pushes of all workers."""

    def __init__(self, reduction: str) -> None:
        self.tensors = {"cut": torch.zeros(40, 1000), "whole": torch.ones(7)}
        self.rows = torch.zeros(10, DIM)
        self.divisor = WORKERS if reduction == "mean" else 1

    def step(self, clock: int) -> None:
        dense = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        rows = torch.zeros_like(self.rows)
        for worker in range(WORKERS):
            gradients, ids, of_rows = pushed_by(worker, clock)
            for name, gradient in gradients.items():
                dense[name] += gradient
            rows.index_add_(0, ids.flatten(), of_rows.flatten(0, 1))
        for name, gradient in dense.items():
            self.tensors[name] -= 0.25 * gradient / self.divisor
        self.rows -= 0.25 * rows / self.divisor


def tables_of_whole_numbers(reduction: str) -> Tables:
    tensors = OneProcess(reduction).tensors
    return [
        ps.Dense("dense", tensors, optimizer=SGD, reduction=reduction),
        ps.Sparse("rows", DIM, optimizer=SGD, reduction=reduction, rows=10),
    ]


def means(worker: int | None) -> Tables:
    return tables_of_whole_numbers("mean")


def sums(worker: int | None) -> Tables:
    return tables_of_whole_numbers("sum")


def whole_numbers(server: ps.ParameterServer, reduction: str) -> None:
    """Each gradient is pushed in two halves."""
    expected = OneProcess(reduction)
    for clock in range(6):
        pulled = server["dense"].pull()
        assert all(torch.equal(pulled[name], tensor) for name, tensor in expected.tensors.items())
        assert torch.equal(server["rows"].pull(torch.arange(10)), expected.rows)
        pulled["cut"].zero_()  # a copy
        gradients, ids, of_rows = pushed_by(server.worker, clock)
        for _ in range(2):
            server["dense"].push(gradients, scale=0.5)
            server["rows"].push(ids, of_rows, scale=0.5)
        server.clock()
        expected.step(clock)


@pytest.mark.parametrize("layout", SEVERAL_HOSTS)
def test_whole_numbers_have_the_bits_of_one_process(layout: str) -> None:
    work(layout, Run(means, whole_numbers, ["mean"]), Run(sums, whole_numbers, ["sum"]))


def modules_train(rank: int, world: int, layout: str) -> None:
    """A module is not bound: it may be read between clock() and pull(), and is filled by pull()."""
    model = mlp()
    table = ps.Dense("net", model, optimizer=ps.Adam(0.01))
    with made(layout, [table]) as server:
        if server.worker is None:
            return server.serve()
        assert not server["net"].is_bound and server.workers == WORKERS
        expected = synchronous(WORKERS, torch.optim.Adam, {"lr": 0.01}, "mean")
        for step, values in zip(range(6), expected, strict=False):
            pending = server["net"].pull(async_op=step % 2 == 1)
            assert pending is None or pending.wait() is None
            assert_close(model, values)
            x, y = batch(step, server.worker)
            (model(x) - y).square().mean().backward()
            trireme.clip_grad_norm_(model.parameters(), 1e9)
            server["net"].push()
            assert all(parameter.grad is None for parameter in model.parameters())
            server.clock()
            model(x)
        with raises(ValueError, "[ps] writing: got table 'net'"), trireme.writing(model):
            raise AssertionError("it may not be written")
    model(x)


@pytest.mark.parametrize("layout", ["2+3", "1+4"])
def test_modules_train_as_in_one_process(layout: str) -> None:
    on_hosts(layout, modules_train, layout)


def embedded(worker: int | None) -> Tables:
    return [
        ps.Sparse(name, DIM, optimizer=ps.SGD(0.3), init=ps.Normal(1.0), seed=seed, rows=31)
        for seed, name in enumerate(("one", "two"))
    ]


def embeddings_train(server: ps.ParameterServer, mode: str) -> None:
    """torch's modules on the whole batch are the oracle; each worker has a third of it."""
    embedding, bag = ps.Embedding(server["one"]), ps.EmbeddingBag(server["two"], mode)
    torchs_embedding, torchs_bag = nn.Embedding(31, DIM), nn.EmbeddingBag(31, DIM, mode=mode)
    both = {"one": torchs_embedding, "two": torchs_bag}
    for name, module in both.items():
        module.weight.data.copy_(server[name].pull(torch.arange(31)))
    optimizer = torch.optim.SGD([table.weight for table in both.values()], lr=0.3)
    for step in range(4):
        ids = torch.randint(31, (9, 3), generator=torch.Generator().manual_seed(step))
        own = ids.chunk(WORKERS)[server.worker]
        (embedding(own).mean(1).tanh() * bag(own)).square().mean().backward()
        server.clock()
        optimizer.zero_grad()
        (torchs_embedding(ids).mean(1).tanh() * torchs_bag(ids)).square().mean().backward()
        optimizer.step()
    for name, module in both.items():
        torch.testing.assert_close(server[name].pull(torch.arange(31)), module.weight.data)
    assert embedding.eval()(own).shape == (3, 3, DIM)


@pytest.mark.parametrize("layout", ["2+3", "2+2+2"])
def test_embeddings_train_as_torchs(layout: str) -> None:
    work(layout, *(Run(embedded, embeddings_train, [mode]) for mode in ("mean", "sum", "max")))


def lazily_negated(worker: int | None) -> Tables:
    first = {"x": torch._neg_view(torch.ones(50_000))}
    return [
        ps.Dense("dense", first, optimizer=ps.Sum(), reduction="sum"),
        ps.Sparse("rows", DIM, optimizer=ps.Sum(), reduction="sum"),
    ]


def pushes_a_lazy_minus(server: ps.ParameterServer) -> None:
    assert (server["dense"].pull()["x"] == -1).all()
    server["dense"].push({"x": torch._neg_view(torch.ones(50_000))})
    server["rows"].push(torch.arange(20), torch._neg_view(torch.ones(20, DIM)))
    server.clock()
    assert (server["dense"].pull()["x"] == -1 - WORKERS).all()
    assert (server["rows"].pull(torch.arange(20)) == -WORKERS).all()


def test_a_lazy_minus_is_one() -> None:
    work("2+3", Run(lazily_negated, pushes_a_lazy_minus))


# --- what pulls see ------------------------------------------------------------------------------


def sees_what_it_must(server: ps.ParameterServer, staleness: int) -> None:
    """Its own pushes at once; those of others that are old enough; never less than before."""
    before = torch.zeros(WORKERS)
    for clock in range(15):
        seen = counted(server)
        assert (seen[:, server.worker] == clock).all() and (seen >= before).all()
        assert (seen >= clock - staleness).all()
        count(server)
        before = counted(server)
        assert (before[:, server.worker] == clock + 1).all() and (before >= seen).all()
        server.clock()
    meet(server, "has counted")
    until(lambda: bool((counted(server) == 15).all()))
    until(lambda: server.clocks() == [15] * WORKERS)
    assert server.stats()["slowest"] in range(WORKERS)


def waits_at_its_bound(server: ps.ParameterServer, staleness: int) -> None:
    """The pull that was asked for waits for the slowest worker, and for no other."""
    if server.worker == 0:
        for _ in range(staleness + 1):
            counted(server)
            count(server)
            server.clock()
        pulls = [server["dense"].pull(async_op=True), server["rows"].pull(COUNTED, async_op=True)]
        time.sleep(0.2)
        assert not any(pull.done() for pull in pulls)
        meet(server, "has asked", [0])
        until(lambda: all(pull.done() for pull in pulls))
        seen = torch.cat([pulls[0].wait()["w"], pulls[1].wait()])
        assert (seen[:, 0] == staleness + 1).all() and (seen[:, 1:] >= 1).all()
    else:
        stay_until("worker 0 has asked")
        count(server)
        server.clock()
    meet(server, "is at its bound")


@pytest.mark.parametrize("layout", ["2+3", "2+2+2"])
def test_ssp_sees_what_it_must(layout: str) -> None:
    work(
        layout,
        *(
            Run(counters, program, [staleness], {"mode": "ssp", "staleness": staleness})
            for staleness, program in ((2, sees_what_it_must), (1, waits_at_its_bound))
        ),
    )


def waits_for_nobody(server: ps.ParameterServer) -> None:
    if server.worker != 0:
        stay_until("worker 0 has counted")
    sees_what_it_must(server, 1000)


def a_rate_for_all(server: ps.ParameterServer) -> None:
    """One worker sets it; its next pull says that all hosts know it."""
    if server.worker == 0:
        push_ones(server)
        for table in ("dense", "rows"):
            server[table].set_lr(0.5)
        push_ones(server)
        assert has_all(server, -1.5)
    meet(server, "knows the rate")
    if server.worker != 0:
        push_ones(server)
    meet(server, "has pushed")
    until(lambda: has_all(server, -2.5))


@pytest.mark.parametrize("layout", ["2+3", "2+2+2"])
def test_async_waits_for_nobody(layout: str) -> None:
    runs = [Run(counters, waits_for_nobody), Run(rates, a_rate_for_all)]
    for run in runs:
        run.options["mode"] = "async"
    work(layout, *runs)


def leaves(server: ps.ParameterServer) -> None:
    """Pushes of its open clock are dropped on all hosts; a mean is over those that are there."""
    for clock in range(4):
        value = 3.0 * (server.worker + 1)
        server["dense"].push({"w": torch.full((40, 1000), value)})
        server["rows"].push(COUNTED, torch.full((len(COUNTED), DIM), value))
        if server.worker == 2 and clock == 2:
            server.leave()
            with raises(RuntimeError, "[ps] push: got a worker that has left"):
                push_ones(server)
            return
        server.clock()
    assert has_all(server, -(6 + 6 + 4.5 + 4.5))
    assert server.clocks() == [4, 4, 2] and 2 in server.stats()["left"]


@pytest.mark.parametrize("layout", ["2+3", "3+2 apart"])
def test_clocks_are_committed_without_who_has_left(layout: str) -> None:
    work(layout, Run(rates, leaves))


def begins_before_it_is_served(server: ps.ParameterServer) -> None:
    """What is pushed waits for the servers; Ctrl-C ends a pull that does, and no more."""
    for _ in range(2):
        count(server)
        server.clock()
    if server.worker == 0:
        with pytest.raises(KeyboardInterrupt):
            say("0 pulls")
            counted(server)
    if server.worker == 1:
        stay_until("0 pulls")
        time.sleep(0.3)
        os.kill(process_of(0), signal.SIGINT)
    meet(server, "has begun")
    assert (counted(server) == 2).all()


def test_who_serves_may_come_late() -> None:
    words = [f"worker {worker} has begun" for worker in range(WORKERS)]
    options = {"mode": "ssp"}
    work("2+3", Run(counters, begins_before_it_is_served, (), options, words))


def among_some_ranks(rank: int, world: int) -> None:
    """The server's ranks are those of the group."""
    options = SimpleNamespace(host_partition=LAYOUTS["2+3"][rank])
    group = dist.new_group([0, 1, 2, 4], pg_options=options)
    if rank == 3:
        return
    with ps.ParameterServer(rates(None), servers=[1, 3], group=group) as server:
        assert server.worker == {0: 0, 2: 1}.get(rank)
        if server.worker is None:
            return server.serve()
        for clock in range(3):
            assert has_all(server, -clock)
            push_ones(server)
            server.clock()


def test_a_group_of_some_ranks() -> None:
    on_hosts("2+3", among_some_ranks)


# --- what is refused -----------------------------------------------------------------------------


def small(**options: Any) -> ps.Dense:
    return ps.Dense(
        "t", {"x": torch.zeros(3), "y": torch.zeros(40, 1000)}, optimizer=SGD, **options
    )


def servers_that_cannot_be(rank: int, world: int) -> None:
    """All ranks are told."""
    for servers in (0, 1, [2, 4]):
        text = "[ps] got no rank that serves on the host of rank 0, expected one on each host"
        with raises(ValueError, text):
            ps.ParameterServer([small()], servers=servers)
    for options, text in (
        ({"backup": 1}, "got backup=1 over 2 hosts, expected 0"),
        ({"servers": [0, 5]}, "got rank 5 as a server, expected ranks in [0, 5)"),
        ({"servers": 5}, "got 5 servers among 5 ranks"),
        ({"staleness": 1}, "got staleness=1 under mode='bsp', expected 0"),
    ):
        with raises(ValueError, "[ps] ", text):
            ps.ParameterServer([small()], **{"servers": [0, 4], **options})
    with raises(ValueError, "[ps] ", "as float32 [3] on rank 0 and", "as float32 [4] on rank 4"):
        differs = ps.Dense("t", {"x": torch.zeros(3 + (rank == 4))}, optimizer=SGD)
        ps.ParameterServer([differs], servers=[0, 4])
    with raises(ValueError, "[ps] ", "got rank 7 as a server"):
        ps.ParameterServer([small()], servers=[0, 7] if rank == 3 else [0, 4])


def verbs_that_cannot_be(rank: int, world: int) -> None:
    """Nothing is sent: the next clock knows nothing of it."""
    with made("1+4", [small(), ps.Sparse("items", DIM, optimizer=SGD, rows=50)]) as server:
        with raises(ValueError, "[ps] accept: got a server over 2 hosts, expected one host"):
            server.accept(store())
        if server.worker is None:
            for verb in (server["t"].pull, server.clock, lambda: server["t"].push({})):
                with raises(RuntimeError, "got a rank that serves, expected one that works"):
                    verb()
            return server.serve()
        with raises(RuntimeError, "[ps] serve: got a rank that works"):
            server.serve()
        refuse_dense(server["t"])
        refuse_rows(server["items"])
        server.clock()
        assert all((tensor == 0).all() for tensor in server["t"].pull().values())
        assert len(server["items"]) == 0
    for verb in (server["t"].pull, server.clock, server.clocks, server.stats, server.leave):
        with raises(RuntimeError, "got a server that is closed"):
            verb()


def refuse_dense(table: ps.DenseTable) -> None:
    for async_op in (False, True):
        with raises(ValueError, "[ps] pull: got a view over hosts, expected a copy"):
            table.pull(view=True, async_op=async_op)
        for gradients, text in (
            ({"y": torch.ones(40, 1000), "x": torch.ones(4)}, "of shape [4] for 'x' of table 't'"),
            ({"x": torch.ones(3), "y": torch.ones(40, 999)}, "of shape [40, 999] for 'y'"),
            ({"x": torch.ones(3), "z": torch.ones(3)}, "of 'z', expected names of table 't'"),
            ({"x": torch.ones(3, dtype=torch.long)}, "of dtype int64 for 'x'"),
            ({"x": torch.ones(3).to_sparse()}, "of layout Sparse for 'x' of table 't'"),
        ):
            with raises(ValueError, "[ps] push: got a gradient " + text):
                table.push(gradients, async_op=async_op)
    with raises(TypeError, "push: got no gradients, expected gradients by name"):
        table.push()
    with raises(ValueError, "set_lr: got -1"):
        table.set_lr(-1)


def refuse_rows(table: ps.SparseTable) -> None:
    many = torch.arange(50)
    many[-1] = 50
    for verb in (table.pull, lambda ids: table.push(ids, torch.ones(*ids.shape, DIM))):
        with raises(ValueError, "of table 'items': got id 50, expected ids in [0, 50)"):
            verb(many)
        with raises(TypeError, "of table 'items': got ids of float32, expected int64 or int32"):
            verb(torch.zeros(2))
    for gradients, text in (
        (torch.ones(50, DIM + 1), "shape [50, 4], expected float32 [50, 3]"),
        (torch.ones(50, DIM, dtype=torch.half), "dtype float16"),
    ):
        with raises(ValueError, "[ps] push of table 'items': got gradients of " + text):
            table.push(torch.arange(50), gradients)
    with raises(ValueError, "got view=True for the sparse table 'items'"):
        table.pull(many, view=True)


def refusals(rank: int, world: int) -> None:
    servers_that_cannot_be(rank, world)
    verbs_that_cannot_be(rank, world)


def test_what_is_refused() -> None:
    on_hosts("1+4", refusals)
