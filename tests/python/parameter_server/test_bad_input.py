"""Mistakes of a caller: their types and texts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from trireme import ps

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_ranks

SGD = ps.SGD(0.1)
RANKED = re.compile(r".*\[ps\] .* \(rank \d+ of \d+\)\. .*", re.DOTALL)  # a KeyError quotes it


def dense(**options: Any) -> ps.Dense:
    return ps.Dense("t", {"x": torch.zeros(3)}, optimizer=SGD, **options)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: ps.Dense("t", {"x": 3}, optimizer=SGD), TypeError, "'x' is int, expected a tens"),
        (lambda: ps.Dense("t", [1], optimizer=SGD), TypeError, "source is list, expected a module"),
        (lambda: ps.Dense(3, nn.Linear(1, 1), optimizer=SGD), TypeError, "name is int"),
        (
            lambda: ps.Dense("t", nn.Linear(1, 1), optimizer=torch.optim.SGD),
            TypeError,
            "optimizer is type, expected ps.SGD",
        ),
        (lambda: dense(reduction="max"), ValueError, "got reduction='max', expected 'mean' or"),
        (lambda: dense(staleness="1"), TypeError, "staleness is str, expected an int"),
        (lambda: dense(compression="bf16"), ValueError, "got compression='bf16', expected None"),
    ],
)
def test_a_table_that_cannot_be(make: Any, kind: type[Exception], text: str) -> None:
    with raises(kind, "[ps] ", text, form=RANKLESS_FORM):
        make()


@on_shm_ranks(2, timeout=60)
def test_dtensors_are_no_source(rank: int) -> None:
    """Ranks may have other parts of them, while all have all of a table."""
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Linear(2, 2)
    distribute_module(net, mesh)
    text = "got 'weight' for table 't' as a DTensor, of which ranks may have parts, expected"
    for source in (net, {"weight": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}):
        with raises(TypeError, "[ps] " + text, form=RANKLESS_FORM):
            ps.Dense("t", source, optimizer=SGD)
    whole = {name: parameter.full_tensor() for name, parameter in net.named_parameters()}
    with ps.ParameterServer(
        [ps.Dense("t", whole, optimizer=SGD), ps.Sparse("rows", 4, optimizer=SGD)]
    ) as server:
        ids, row = torch.zeros(2, dtype=torch.long), torch.ones(2, 4)
        with raises(ValueError, "[ps] push: got a gradient of a subclass of Tensor for 'weight'"):
            server["t"].push({"weight": net.weight.detach()})
        with raises(ValueError, "[ps] push of table 'rows': got gradients of a subclass of Tensor"):
            server["rows"].push(ids, distribute_tensor(row, mesh, [Replicate()]))
        with raises(TypeError, "[ps] push of table 'rows': got ids as a subclass of Tensor"):
            server["rows"].push(distribute_tensor(ids, mesh, [Replicate()]), row)


@on_shm_ranks(2, timeout=60)
def test_a_server_that_cannot_be(rank: int) -> None:
    for options, text in (
        ({"staleness": -1, "mode": "ssp"}, "got staleness=-1, expected >= 0"),
        ({"staleness": 1}, "got staleness=1 under mode='bsp', expected 0"),
        ({"backup": 2}, "got backup=2, expected one in [0, 2)"),
        ({"backup": 1, "mode": "async"}, "got backup=1 under mode='async'"),
        ({"servers": 2}, "got 2 servers among 2 ranks"),
        ({"servers": [5]}, "got rank 5 as a server, expected ranks in [0, 2)"),
        ({"timeout": -3}, "got timeout=-3000 ms, expected a positive one"),
    ):
        with raises(ValueError, "[ps] " + text):
            ps.ParameterServer([dense()], **options)
    for options, text in (
        ({"mode": "eventual"}, "got mode='eventual', expected one of 'bsp', 'ssp', 'async'"),
        ({"on_worker_loss": "wait"}, "got on_worker_loss='wait'"),
    ):
        with raises(ValueError, "[ps] " + text, form=RANKLESS_FORM):
            ps.ParameterServer([dense()], **options)
    with raises(TypeError, "[ps] a table is str, expected ps.Dense", form=RANKLESS_FORM):
        ps.ParameterServer(["t"])
    with raises(ValueError, "[ps] got no tables, expected at least one"):
        ps.ParameterServer([])
    with raises(ValueError, "two tables of the name 't'"):
        ps.ParameterServer([dense(), dense()])
    with raises(ValueError, "[ps] table 't': got SGD(lr=-1", "expected lr >= 0"):
        ps.ParameterServer([ps.Dense("t", {"x": torch.zeros(1)}, optimizer=ps.SGD(-1.0))])


@on_shm_ranks(2, timeout=60)
def test_tables_that_differ_by_rank_are_named(rank: int) -> None:
    table = ps.Dense("items", {"x": torch.zeros(3 + rank)}, optimizer=SGD)
    text = (
        "got 'x' of table 'items' as float32 [3] on rank 0 and 'x' of table 'items' as float32 [4]"
    )
    with raises(ValueError, "[ps] " + text + " on rank 1"):
        ps.ParameterServer([table])
    ps.ParameterServer([dense()]).close()


@on_shm_ranks(1, timeout=60)
def test_verbs_that_cannot_be(rank: int) -> None:
    net = nn.Linear(2, 2)
    server = ps.ParameterServer([dense(), ps.Dense("net", net, optimizer=SGD)])
    table = server["t"]
    with raises(KeyError, "got table 'z', expected one of 't', 'net'", form=RANKED):
        server["z"]
    with raises(ValueError, "got a gradient of shape [4] for 'x' of table 't'"):
        table.push({"x": torch.ones(4)})
    with raises(ValueError, "got a gradient of 'y', expected names of table 't'"):
        table.push({"y": torch.ones(3)})
    with raises(ValueError, "got a gradient of dtype int64 for 'x'"):
        table.push({"x": torch.ones(3, dtype=torch.long)})
    with raises(TypeError, "push: got no gradients, expected gradients by name"):
        table.push()
    with raises(TypeError, "push: got int as 'x', expected a tensor"):
        table.push({"x": 3})
    with raises(TypeError, "push: got gradients for a table made of a module"):
        server["net"].push({"weight": torch.ones(2, 2)})
    with raises(ValueError, "pull: got view=True for table 'net' made of a module"):
        server["net"].pull(view=True)
    with raises(ValueError, "set_lr: got -1"):
        table.set_lr(-1)
    net.weight.grad = torch.ones(2, 2).to_sparse()
    with raises(ValueError, "got a gradient of layout Sparse for 'weight' of table 'net'"):
        server["net"].push()
    server.leave()
    with raises(RuntimeError, "[ps] push: got a worker that has left"):
        table.push({"x": torch.ones(3)})
    server.close()
    server.close()
    for verb in (table.pull, server.clock, server.clocks, server.stats, server.leave, server.serve):
        with raises(RuntimeError, "got a server that is closed"):
            verb()


@on_shm_ranks(2, timeout=60)
def test_a_server_rank_has_no_worker_verbs(rank: int) -> None:
    with ps.ParameterServer([dense()], servers=1) as server:
        if rank == 0:
            with raises(RuntimeError, "[ps] serve: got a rank that works"):
                server.serve()
            return
        for verb in (server["t"].pull, server.clock, lambda: server["t"].push({})):
            with raises(RuntimeError, "got a rank that serves, expected one that works"):
                verb()
        server.serve()


@on_shm_ranks(2, timeout=60)
def test_what_one_rank_cannot_do_is_told_to_all(rank: int) -> None:
    with raises(ValueError, "[ps] ", "got rank 5 as a server"):
        ps.ParameterServer([dense()], servers=[5] if rank == 1 else 0)


@on_shm_ranks(3, timeout=60)
def test_learning_rates_and_what_returns_at_once(rank: int) -> None:
    with ps.ParameterServer([dense()], backup=1) as server:
        with raises(ValueError, "[ps] set_lr: got table 't' with backup workers"):
            server["t"].set_lr(0.1)
        with raises(ValueError, "[ps] push: got a gradient of shape"):
            server["t"].push({"x": torch.zeros(4)}, async_op=True)
        with raises(ValueError, "[ps] pull: got a view with backup workers"):
            server["t"].pull(view=True, async_op=True)
