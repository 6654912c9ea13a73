"""A module whose parameters lie in a table's memory: who may read and write them, and when."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from trireme import ps

from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_shm_ranks

ANY = re.compile(r"\[ps\] .*", re.DOTALL)


def bound(net: nn.Module, **options: object) -> ps.ParameterServer:
    return ps.ParameterServer([ps.Dense("net", net, optimizer=ps.SGD(0.1))], **options)


@on_shm_ranks(2, timeout=60)
def test_a_forward_between_clock_and_pull_raises(rank: int) -> None:
    net = mlp()
    with bound(net) as server:
        table = server["net"]
        for _ in range(2):
            table.pull()
            net(torch.ones(1, 6)).sum().backward()
            table.push()
            server.clock()
            for forward in (lambda: net(torch.ones(1, 6)), lambda: net[0](torch.ones(1, 6))):
                with raises(RuntimeError, "[ps] got a forward of the module of table 'net'"):
                    forward()
            with raises(RuntimeError, "(or its state_dict(), or a copy) after clock()"):
                net.state_dict()
    net(torch.ones(1, 6))


def assert_independent(copied: nn.Module, net: nn.Module) -> None:
    for one, two in zip(copied.parameters(), net.parameters(), strict=True):
        assert type(one) is nn.Parameter and one.requires_grad == two.requires_grad
        assert torch.equal(one, two) and one.data_ptr() != two.data_ptr()
    copied(torch.ones(1, 6))


def pickled(net: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(net))
    return copied


@on_shm_ranks(2, timeout=60)
def test_a_copy_between_clock_and_pull_raises(rank: int) -> None:
    """Also of a part, inside of something else, and as a pickle; after a pull it is torch's."""
    net = mlp()
    net[0].bias.requires_grad_(False)
    with bound(net) as server:
        table = server["net"]
        for _ in range(2):
            server.clock()
            for copy_it in (
                lambda: copy.deepcopy(net),
                lambda: copy.deepcopy({"layers": [net[0]]}),
                lambda: pickled(net),
                lambda: torch.save(net, io.BytesIO()),
            ):
                text = "Others write its parameters meanwhile: pull() says that they may be read."
                with raises(RuntimeError, "[ps] got a forward of the module of table 'net'", text):
                    copy_it()
            table.pull()
            assert_independent(pickled(net), net)
            copied, layer = copy.deepcopy([net, net[0]])
            assert copied[0] is layer
            assert_independent(copied, net)
            server.clock()
            assert_independent(copy.deepcopy(copied), copied)  # others do not write it
        table.pull()
        buffer = io.BytesIO()
        torch.save(net.state_dict(keep_vars=True), buffer)
        buffer.seek(0)
        assert torch.load(buffer, weights_only=True).keys() == net.state_dict().keys()
        server.clock()
    assert_independent(copy.deepcopy(net), net)
    assert_independent(pickled(net), net)


@on_shm_ranks(2, timeout=60)
def test_a_closed_server_leaves_private_parameters(rank: int) -> None:
    """Whether it was closed after a pull or after a clock: the values of one clock."""
    for pulls in (True, False):
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        with ps.ParameterServer(
            [ps.Dense("net", net, optimizer=ps.SGD(1.0), reduction="sum")]
        ) as server:
            for _ in range(3):
                server["net"].pull()
                net.weight.grad = -torch.ones(1, 1)
                server["net"].push()
                server.clock()
            if pulls:
                server["net"].pull()
                assert net.weight.item() == 6
        assert net.weight.item() in ((6,) if pulls else (4, 6))
        dist.barrier()
        with torch.no_grad():
            net.weight.fill_(rank)
        dist.barrier()
        assert net.weight.item() == rank
        buffer = io.BytesIO()
        torch.save(net, buffer)


@on_shm_ranks(2, timeout=60)
def test_other_writes_are_refused(rank: int) -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bound(net) as server:
        table = server["net"]
        table.pull()
        net(torch.ones(1, 6)).sum().backward()
        dist.barrier()
        if rank == 0:
            optimizer.step()
            with raises(RuntimeError, "[ps] push: parameter '0.weight' of table 'net' was changed"):
                table.push()
        dist.barrier()
        table.push()  # told once
        server.clock()
        table.pull()


@on_shm_ranks(2, timeout=60)
def test_writing_makes_the_first_workers_values_everybodys(rank: int) -> None:
    net = mlp()
    with bound(net) as server:
        table = server["net"]
        table.pull()
        with trireme.writing(net), torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0).add_(rank + 3)
        assert all((parameter == 3).all() for parameter in net.parameters())
        state = {name: tensor + 1 for name, tensor in net.state_dict().items()}
        with trireme.writing(net):
            net.load_state_dict(state)
        assert all((parameter == 4).all() for parameter in net.parameters())
        if rank == 1:
            with pytest.raises(ArithmeticError), trireme.writing(net), torch.no_grad():
                net[0].weight.zero_()
                raise ArithmeticError("no values here")
        else:
            text = "has left it by an exception: ArithmeticError: no values here"
            with raises(dist.DistBackendError, "worker 1 (rank 1", text), trireme.writing(net):
                pass
        assert all((parameter == 4).all() for parameter in net.parameters())
        net(torch.ones(1, 6)).sum().backward()
        table.push()
        server.clock()
        table.pull()


@on_shm_ranks(2, timeout=60)
def test_writing_another_shape_is_refused(rank: int) -> None:
    """On the worker that does it by its own text, and on the others; all keep their values."""
    net = mlp()
    with bound(net) as server:
        server["net"].pull()
        before = net[0].weight.detach().clone()
        for worker in (0, 1):
            text = "got '0.weight' as float32 [2, 2], expected float32"
            kind = ValueError if rank == worker else dist.DistBackendError
            with raises(kind, "[ps] writing of table 'net'", text), trireme.writing(net):
                if rank == worker:
                    net[0].weight.data = torch.zeros(2, 2)
            assert torch.equal(net[0].weight, before)


@on_shm_ranks(2, timeout=60)
def test_writing_at_different_clocks_is_refused(rank: int) -> None:
    net = mlp()
    with bound(net) as server:
        if rank == 0:
            server.clock()
        text = "at clock 1, expected" if rank == 1 else "at clock 0, expected"
        with raises(ValueError, "[ps] writing of table 'net'", text), trireme.writing(net):
            pass
        dist.barrier()


@on_shm_ranks(2, timeout=60)
def test_ssp_fills_parameters(rank: int) -> None:
    """There a pull is one copy: the parameters are this worker's own."""
    net = mlp()
    with bound(net, mode="ssp") as server:
        table = server["net"]
        assert not table.is_bound
        graph = net(torch.ones(1, 6)).sum()
        table.pull()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()
        with torch.no_grad():
            net[0].weight.zero_()
        table.pull()
        assert net[0].weight.abs().sum() > 0


@on_shm_ranks(1, timeout=60)
def test_parameters_that_somebody_keeps_are_refused(rank: int) -> None:
    net = mlp()
    server = bound(net)
    with raises(ValueError, "'0.weight' for table 'net', which another table keeps", form=ANY):
        bound(net)
    server.close()
    bound(net).close()
    optimizer = trireme.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with raises(ValueError, "which ZeroRedundancyOptimizer has sharded", form=ANY):
        bound(net)
    del optimizer
    sharded = trireme.fully_shard(mlp())
    with raises(ValueError, "which fully_shard has sharded", form=ANY):
        bound(sharded)


@on_shm_ranks(2, timeout=60)
def test_other_parameters_than_those_of_the_table_are_noticed(rank: int) -> None:
    net = mlp()
    with bound(net) as server:
        server["net"].pull()
        state = {name: tensor + 1 for name, tensor in net.state_dict().items()}
        net.load_state_dict(state, assign=True)
        with raises(RuntimeError, "[ps] got other parameters in the module of table 'net'"):
            server.clock()


@on_shm_ranks(2, timeout=60)
def test_writing_needs_a_table_that_lies_in_the_module(rank: int) -> None:
    net = mlp()
    with ps.ParameterServer([ps.Dense("net", net, optimizer=ps.SGD(0.1))], mode="async") as server:
        server["net"].pull()
        with raises(ValueError, "[ps] writing: got table 'net'"), trireme.writing(net):
            pass
