"""Sparse tables from Python: rows by id, the modules that look them up, mistakes and faults."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trireme import ps

from harness.faults import RANKLESS_FORM, kill_this_rank, raises
from harness.forks import in_child
from harness.meeting import process_of, state_of, until
from harness.on_ranks import AGES_S, on_shm_ranks
from parameter_server.faults import gradient_that_kills

DIM = 4
SUM = ps.Sum()


def items(**options: Any) -> ps.Sparse:
    return ps.Sparse("items", DIM, **{"optimizer": SUM, **options})


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@on_shm_ranks(3, timeout=60)
def test_bsp_is_synchronous_sgd_bit_for_bit(rank: int, reduction: str, servers: int) -> None:
    """With whole numbers, one process on all pushes."""
    workers = 3 - servers
    expected = torch.zeros(10, DIM)
    with ps.ParameterServer(
        [items(optimizer=ps.SGD(0.5), reduction=reduction)], servers=servers
    ) as server:
        if server.worker is None:
            server.serve()
            return
        table = server["items"]
        for clock in range(8):
            ids = [torch.tensor([[w, clock], [5, w]]) for w in range(workers)]
            gradients = [torch.full((2, 2, DIM), 2.0 * w * workers + clock) for w in range(workers)]
            assert torch.equal(table.pull(torch.arange(10)), expected)
            table.push(ids[rank], gradients[rank])
            server.clock()
            total = torch.zeros(10, DIM)
            for rows, gradient in zip(ids, gradients, strict=True):
                total.index_add_(0, rows.flatten(), gradient.flatten(0, 1))
            expected -= 0.5 * total / (workers if reduction == "mean" else 1)
        assert len(table) == 10 and torch.equal(table.ids(), torch.arange(10))


@on_shm_ranks(2, timeout=60)
def test_ids_of_any_shape_and_integer(rank: int) -> None:
    init = ps.Uniform(1.0)
    with ps.ParameterServer([items(init=init, seed=-3)], mode="async") as server:
        table = server["items"]
        for ids in (
            torch.tensor(7),
            torch.tensor([7, 7], dtype=torch.int32),
            torch.empty(0, 3, dtype=torch.long),
            torch.tensor([[[-(2**63), 2**63 - 1]]]),
            torch.arange(12).view(3, 4).t(),
        ):
            rows = table.pull(ids)
            assert rows.shape == (*ids.shape, DIM) and rows.dtype == torch.float32
            assert torch.equal(rows, table.pull(ids.contiguous().long()))
            assert torch.equal(rows, table.pull(ids, async_op=True).wait())
            table.push(ids, torch.zeros(*ids.shape, DIM), async_op=True).wait()
        dist.barrier()
        before = len(table)
        unseen = table.pull(torch.tensor([99]), create=False)
        assert len(table) == before
        dist.barrier()
        assert torch.equal(unseen, table.pull(torch.tensor([99])))
        dist.barrier()
        assert len(table) == before + 1
    assert repr(init) == "Uniform(bound=1)" and repr(ps.Zeros()) == "Zeros()"


@on_shm_ranks(3, timeout=60)
def test_tables_beside_each_other_have_a_staleness_each(rank: int) -> None:
    """A pull of a loose table does not wait where one of a strict table would."""
    tables = [items(), ps.Sparse("loose", 1, optimizer=SUM, staleness=5)]
    with ps.ParameterServer(
        [*tables, ps.Dense("dense", {"x": torch.zeros(1)}, optimizer=SUM)], mode="ssp"
    ) as server:
        if rank == 0:
            for clock in range(5):
                assert server["loose"].pull(torch.tensor([0])).item() == clock
                server["loose"].push(torch.tensor([0]), torch.ones(1, 1))
                server.clock()
            pending = server["items"].pull(torch.tensor([0]), async_op=True)
            assert not pending.done()
            dist.barrier()
            assert pending.wait()[0, 0].item() == 2 * 5
            return
        dist.barrier()
        for _ in range(5):
            server["items"].push(torch.tensor([0]), torch.ones(1, DIM))
            server.clock()


# --- modules -------------------------------------------------------------------------------------


def model(embedding: nn.Module, bag: nn.Module) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.bag = embedding, bag

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids).mean(1).tanh() * self.bag(ids)

    return Model()


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@on_shm_ranks(2, timeout=60)
def test_modules_train_as_torch_does(rank: int, mode: str) -> None:
    """Equal to torch's modules on the whole batch, rows and losses."""
    init = ps.Normal(1.0)
    tables = [
        ps.Sparse(name, DIM, optimizer=ps.SGD(0.3), init=init, seed=seed, rows=11)
        for seed, name in enumerate(("one", "two"))
    ]
    with ps.ParameterServer(tables) as server:
        ours = model(ps.Embedding(server["one"]), ps.EmbeddingBag(server["two"], mode))
        assert not list(ours.parameters()) and not ours.state_dict()
        theirs = model(nn.Embedding(11, DIM), nn.EmbeddingBag(11, DIM, mode=mode))
        for name, module in (("one", theirs.embedding), ("two", theirs.bag)):
            module.weight.data.copy_(server[name].pull(torch.arange(11)))
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.3)
        for step in range(6):
            ids = torch.randint(11, (8, 3), generator=torch.Generator().manual_seed(step))
            loss = ours(ids.chunk(2)[rank]).square().mean()
            loss.backward()
            server.clock()
            expected = theirs(ids)
            torch.testing.assert_close(loss, expected.chunk(2)[rank].square().mean())
            optimizer.zero_grad()
            expected.square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(
            server["one"].pull(torch.arange(11)), theirs.embedding.weight.data
        )
        torch.testing.assert_close(server["two"].pull(torch.arange(11)), theirs.bag.weight.data)


@on_shm_ranks(1, timeout=60)
def test_what_modules_take(rank: int) -> None:
    with ps.ParameterServer([items(init=ps.Normal(1.0))], mode="async") as server:
        table = server["items"]
        bag = ps.EmbeddingBag(table, "sum")
        ids, offsets = torch.tensor([3, 1, 3, 2]), torch.tensor([0, 1])
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        rows = table.pull(ids)
        bags = bag(ids, offsets, weights)
        expected = torch.stack([rows[0], 2 * rows[1] + 3 * rows[2] + 4 * rows[3]])
        torch.testing.assert_close(bags, expected)
        bags.sum().backward()
        torch.testing.assert_close(weights.grad, rows.sum(1))
        torch.testing.assert_close(table.pull(ids), rows + torch.tensor([[4.0], [2], [4], [4]]))
        with torch.no_grad():
            assert not bag(ids, offsets).requires_grad
        # In eval mode an id that nobody has seen makes no row.
        embedding = ps.Embedding(table).eval()
        assert len(table) == 3 and embedding(torch.tensor([50])).shape == (1, DIM)
        assert len(table) == 3
        # A second backward pushes again, as a second backward adds to .grad.
        before = table.pull(torch.tensor([1]))
        out = ps.Embedding(table)(torch.tensor([1])).sum()
        out.backward(retain_graph=True)
        out.backward()
        torch.testing.assert_close(table.pull(torch.tensor([1])), before + 2)
        twin = copy.deepcopy(embedding)
        assert twin.table is table
        assert repr(bag) == "EmbeddingBag('items', dim=4, mode='sum')"


@pytest.mark.parametrize("mode", ["bsp", "async"])
@on_shm_ranks(1)
def test_a_lazy_minus_is_one(rank: int, mode: str) -> None:
    """Torch puts off a minus, and has a bit for it: so do gradients of imaginary parts."""
    minus = torch._neg_view
    net = nn.Linear(DIM, 1, bias=False)
    nn.init.zeros_(net.weight)
    dense = ps.Dense("dense", {"x": minus(torch.ones(3))}, optimizer=SUM)
    with ps.ParameterServer(
        [items(), dense, ps.Dense("net", net, optimizer=SUM)], mode=mode
    ) as server:
        assert torch.equal(server["dense"].pull()["x"], -torch.ones(3))
        ids = torch.tensor([5])
        server["items"].push(ids, minus(torch.ones(1, DIM)))
        embedded = ps.Embedding(server["items"])(ids)
        embedded.backward(minus(torch.ones(1, DIM)))
        z = torch.tensor([1 + 2j])
        server["items"].push(ids, z.conj().imag.expand(1, DIM).contiguous())
        server["dense"].push({"x": minus(torch.ones(3))})
        server["net"].pull()
        net.weight.grad = minus(torch.ones(1, DIM))
        server["net"].push()
        server.clock()
        assert torch.equal(server["items"].pull(ids), torch.full((1, DIM), -4.0))
        assert torch.equal(server["items"].pull(minus(-ids)), torch.full((1, DIM), -4.0))
        assert torch.equal(server["dense"].pull()["x"], torch.full((3,), -2.0))
        server["net"].pull()
        assert torch.equal(net.weight.detach(), torch.full((1, DIM), -1.0))


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: ps.Sparse("t", "4", optimizer=SUM), TypeError, "dim is str, expected an int"),
        (lambda: items(init=torch.zeros), TypeError, "init is"),
        (lambda: items(dtype="float32"), TypeError, "dtype is str, expected a dtype"),
        (lambda: items(rows=2.0), TypeError, "rows is float, expected an int"),
        (lambda: items(seed="a"), TypeError, "seed is str"),
        (lambda: items(optimizer=torch.optim.SGD), TypeError, "optimizer is type, expected ps.SGD"),
        (lambda: items(reduction="max"), ValueError, "got reduction='max'"),
        (lambda: ps.Embedding(nn.Linear(1, 1)), TypeError, "table is Linear, expected a sparse"),
    ],
)
def test_a_table_that_cannot_be(make: Any, kind: type[Exception], text: str) -> None:
    with raises(kind, "[ps] ", text, form=RANKLESS_FORM):
        make()


@on_shm_ranks(2, timeout=60)
def test_verbs_that_cannot_be(rank: int) -> None:
    for wrong, text in (
        (items(dtype=torch.long), "table 'items' with dtype int64"),
        (ps.Sparse("items", 0, optimizer=SUM), "dim=0, expected >= 1"),
        (items(init=ps.Normal(-1.0)), "got Normal(std=-1), expected a finite number >= 0"),
        (items(seed=rank), "seed=1, Sum(), reduction='mean' on rank 1"),
    ):
        with raises(ValueError, "[ps] ", text):
            ps.ParameterServer([wrong])
    with ps.ParameterServer([items(rows=5)]) as server:
        table = server["items"]
        for verb in (table.pull, lambda ids: table.push(ids, torch.zeros(*ids.shape, DIM))):
            with raises(ValueError, "of table 'items': got id 5, expected ids in [0, 5)"):
                verb(torch.tensor([0, 5]))
            with raises(TypeError, "of table 'items': got ids of float32, expected int64 or int32"):
                verb(torch.zeros(2))
        with raises(ValueError, "got gradients of shape [2, 3], expected float32 [2, 4]"):
            table.push(torch.tensor([0, 1]), torch.zeros(2, 3))
        with raises(ValueError, "got gradients of dtype float16"):
            table.push(torch.tensor([0]), torch.zeros(1, DIM, dtype=torch.half))
        with raises(TypeError, "push of table 'items': got none as gradients, expected a tensor"):
            table.push(torch.tensor([0]))
        with raises(TypeError, "pull of table 'items': got none as ids, expected a tensor"):
            table.pull()
        with raises(ValueError, "got view=True for the sparse table 'items'"):
            table.pull(torch.tensor([0]), view=True)
        with raises(ValueError, "set_lr: got 1 for table 'items' under Sum()"):
            table.set_lr(1.0)
        assert len(table) == 0

        def is_refused() -> bool:
            with raises(RuntimeError, "[ps] pull: got a forked child"):
                table.pull(torch.tensor([1]))
            return True

        assert in_child(is_refused)
        dist.barrier()
    with raises(RuntimeError, "got a server that is closed"):
        table.pull(torch.tensor([0]))


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_worker_loss", ["raise", "continue"])
@on_shm_ranks(2, timeout=40, patience_s=AGES_S, dying=[1])
def test_a_worker_dies_while_it_holds_a_row(rank: int, on_worker_loss: str) -> None:
    """Nobody hangs; the row is named, and counted as torn; other rows go on."""
    server = ps.ParameterServer(
        [ps.Sparse("big", 5000, optimizer=SUM)], mode="async", on_worker_loss=on_worker_loss
    )
    table = server["big"]
    ids = torch.tensor([17])
    if rank == 1:
        table.push(ids, gradient_that_kills(5000).view(1, 5000))
        raise AssertionError("the gradient could be read")
    until(lambda: state_of(process_of(1)) == "Z")
    row = "row 17 of table 'big'"
    if on_worker_loss == "raise":
        with raises(dist.DistBackendError, "worker 1 (rank 1, process", f"while it held {row}"):
            table.push(ids, torch.ones(1, 5000))
    else:
        table.push(torch.tensor([3]), torch.ones(1, 5000))
        table.push(ids, torch.ones(1, 5000))
        assert torch.equal(table.pull(torch.tensor([3, 17])), torch.ones(2, 5000))
    stats = server.stats()
    assert stats["torn"] == 1 and stats["torn_blocks"] == [row]
    server.close()


@pytest.mark.parametrize("mode", ["bsp", "ssp"])
@on_shm_ranks(3, timeout=40, patience_s=AGES_S, dying=[1])
def test_the_others_go_on(rank: int, mode: str) -> None:
    server = ps.ParameterServer([items(reduction="sum")], mode=mode, on_worker_loss="continue")
    table = server["items"]
    ids = torch.tensor([rank, 7])
    table.push(ids, torch.ones(2, DIM))
    server.clock()
    if rank == 1:
        kill_this_rank()
    for _ in range(4):
        table.push(ids, torch.ones(2, DIM))
        server.clock()
        table.pull(ids)
    until(lambda: server.clocks() == [5, 1, 5])
    until(lambda: table.pull(torch.tensor([7]))[0, 0].item() == 11)
    assert table.pull(torch.tensor([0, 1, 2]))[:, 0].tolist() == [5, 1, 5]
    server.close()


@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_a_stopped_worker_is_named_at_the_deadline(rank: int) -> None:
    with ps.ParameterServer([items()], mode="ssp", timeout=1) as server:
        server.clock()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            until(lambda: state_of(process_of(1)) == "T")
            server.clock()
            text = "has not come within 1 s; it is alive, at clock 1 (its process is stopped)"
            with raises(dist.DistBackendError, "pull of table 'items' at clock 2: worker 1", text):
                server["items"].pull(torch.tensor([1]))
            os.kill(process_of(1), signal.SIGCONT)
        dist.barrier()
