"""What pulls return under each mode, against one process."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import trireme
from trireme import ps

from harness.meeting import say, stay_until
from harness.models import mlp
from harness.on_ranks import on_shm_ranks
from parameter_server.one_process import assert_close, batch, gradients, synchronous

SPECS = {
    "sgd": (ps.SGD(0.1, momentum=0.9, weight_decay=0.01), torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (ps.Adam(0.01), torch.optim.Adam, {"lr": 0.01}),
    "adamw": (ps.AdamW(0.01, betas=(0.8, 0.9)), torch.optim.AdamW,
              {"lr": 0.01, "betas": (0.8, 0.9)}),
    "adagrad": (ps.Adagrad(0.05), torch.optim.Adagrad, {"lr": 0.05}),
}  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("optimizer", SPECS)
@on_shm_ranks("world", timeout=60)
def test_bsp_is_synchronous_training(rank: int, world: int, optimizer: str, reduction: str) -> None:
    spec, kind, options = SPECS[optimizer]
    net = mlp()
    with ps.ParameterServer(
        [ps.Dense("net", net, optimizer=spec, reduction=reduction)], mode="bsp"
    ) as server:
        table = server["net"]
        assert table.is_bound and server.worker == rank and server.workers == world
        for step, expected in zip(
            range(6), synchronous(world, kind, options, reduction), strict=False
        ):
            table.pull()
            assert_close(net, expected)
            x, y = batch(step, rank)
            (net(x) - y).square().mean().backward()
            table.push()
            assert all(parameter.grad is None for parameter in net.parameters())
            assert server.clock() == step + 1


@on_shm_ranks(3, timeout=60)
def test_whole_numbers_have_the_bits_of_synchronous_sgd(rank: int) -> None:
    """Also with backup=0 spelled out, several pushes of a clock, and a scale."""
    tensors = {"a": torch.zeros(40, 1000), "b": torch.zeros(7)}
    with ps.ParameterServer(
        [ps.Dense("t", tensors, optimizer=ps.SGD(0.25), reduction="sum")], backup=0
    ) as server:
        table = server["t"]
        assert len(table) == 2
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        for clock in range(5):
            pulled = table.pull()
            assert all(torch.equal(pulled[name], expected[name]) for name in expected)
            pulled["a"].zero_()  # a copy
            for _ in range(2):
                table.push({"a": torch.full((40, 1000), rank + clock + 1.0)}, scale=2.0)
            table.push({"b": None})
            server.clock()
            expected["a"] -= 0.25 * sum(4 * (worker + clock + 1) for worker in range(3))


@pytest.mark.parametrize("mode", ["ssp", "async"])
@on_shm_ranks(2, timeout=60)
def test_a_worker_alone_in_time_trains_as_one_process(rank: int, mode: str) -> None:
    """Under ssp and async pushes are steps of their own: here of one worker after the other."""
    net, one = mlp(), mlp()
    optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
    staleness = {"ssp": 20}.get(mode, 0)
    with ps.ParameterServer(
        [ps.Dense("net", net, optimizer=ps.Adam(0.01))], mode=mode, staleness=staleness
    ) as server:
        table = server["net"]
        assert not table.is_bound
        for step in range(8):
            turn = step % 2
            for parameter, grad in zip(one.parameters(), gradients(one, step, turn), strict=True):
                parameter.grad = grad
            optimizer.step()
            if rank == turn:
                if step > 0:
                    stay_until(f"step {step - 1}")
                table.pull()
                x, y = batch(step, turn)
                (net(x) - y).square().mean().backward()
                table.push()
                server.clock()
                say(f"step {step}")
        stay_until("step 7")
        table.pull()
        assert_close(net, one)


@on_shm_ranks(2, timeout=60)
def test_ssp_sees_what_it_must(rank: int) -> None:
    """A pull at clock c sees all pushes of clocks < c - s, and all of its own."""
    tensors = {"counts": torch.zeros(2)}
    own = torch.eye(2)[rank]
    with ps.ParameterServer(
        [ps.Dense("t", tensors, optimizer=ps.Sum())], mode="ssp", staleness=2
    ) as server:
        table = server["t"]
        before = torch.zeros(2)
        for clock in range(30):
            seen = table.pull()["counts"]
            assert seen[rank] == clock and seen[1 - rank] >= clock - 2
            assert (seen >= before).all()
            before = seen
            table.push({"counts": own})
            server.clock()


@on_shm_ranks(2, timeout=60)
def test_clipping_and_evaluation_between_clocks(rank: int) -> None:
    net = mlp()
    with ps.ParameterServer([ps.Dense("net", net, optimizer=ps.SGD(0.1))]) as server:
        table = server["net"]
        for step in range(4):
            table.pull()
            with torch.no_grad():
                net(batch(step, rank)[0])
            x, y = batch(step, rank)
            (1000 * (net(x) - y).square().mean()).backward()
            trireme.clip_grad_norm_(net.parameters(), 1.0)
            before = [parameter.detach().clone() for parameter in net.parameters()]
            table.push()
            server.clock()
            table.pull()
            moved = torch.stack([
                (now - then).norm() for now, then in zip(net.parameters(), before, strict=True)
            ]).norm()  # fmt: skip
            assert moved <= 0.1 * 1.0001


@on_shm_ranks(2, timeout=60)
def test_a_learning_rate_and_what_returns_at_once(rank: int) -> None:
    with ps.ParameterServer(
        [ps.Dense("t", {"x": torch.zeros(1)}, optimizer=ps.SGD(1.0))]
    ) as server:
        table = server["t"]
        for clock in range(4):
            if clock == 2:
                table.set_lr(0.5)
            pull = table.pull(async_op=True)
            assert pull.wait()["x"].item() == [0, 1, 2, 2.5][clock]
            assert pull.done()
            assert table.push({"x": -torch.ones(1)}, async_op=True).wait() is None
            server.clock()
        assert table.pull(view=True)["x"].item() == 3


@on_shm_ranks(3, timeout=60)
def test_ranks_that_serve(rank: int) -> None:
    net = mlp()
    with ps.ParameterServer([ps.Dense("net", net, optimizer=ps.SGD(0.1))], servers=[1]) as server:
        assert server.worker == {0: 0, 1: None, 2: 1}[rank]
        if server.worker is None:
            server.serve()
            assert server.clocks() == [3, 3] and server.stats()["left"] == [0, 1]
            net(torch.ones(1, 6))  # its own
            return
        for step in range(3):
            server["net"].pull()
            net(batch(step, server.worker)[0]).sum().backward()
            server["net"].push()
            server.clock()


@on_shm_ranks(2, timeout=60)
def test_stats_tell_what_was_done(rank: int) -> None:
    with ps.ParameterServer(
        [ps.Dense("t", {"x": torch.zeros(1000)}, optimizer=ps.Adam())], mode="ssp"
    ) as server:
        table = server["t"]
        for _ in range(3):
            table.pull()
            table.push({"x": torch.ones(1000)})
            server.clock()
        stats = server.stats()
        assert stats["pulls"] == stats["pushes"] == 3
        assert stats["bytes_pulled"] == stats["bytes_pushed"] == 3 * 4000
        assert stats["memory_bytes"] > 3 * 4000  # values and two states, once
        assert stats["dropped"] == stats["torn"] == 0 and stats["lost"] == []
        assert stats["clocks"][rank] == 3 and stats["slowest"] in (0, 1)


@on_shm_ranks(2, timeout=60)
def test_a_push_that_nobody_waits_for_is_not_lost(rank: int) -> None:
    table = ps.Dense("t", {"x": torch.zeros(1)}, optimizer=ps.SGD(1.0), reduction="sum")
    with ps.ParameterServer([table]) as server:

        def count(clocks: int) -> None:
            for _ in range(clocks):
                server["t"].push({"x": -torch.ones(1)})
                server.clock()

        if rank == 0:
            count(2)
            given = -torch.ones(1)
            push = server["t"].push({"x": given}, async_op=True)
            assert not push.done()  # the other worker has not clocked yet
            given.zero_()
            del push
            dist.barrier()
            server.clock()
        else:
            dist.barrier()
            count(3)
        assert server["t"].pull()["x"].item() == 6


@on_shm_ranks(2, timeout=60)
def test_who_serves_waits_for_as_long_as_workers_train(rank: int) -> None:
    spec = ps.Dense("t", {"x": torch.zeros(1)}, optimizer=ps.SGD(1.0))
    with ps.ParameterServer([spec], servers=1, timeout=0.2) as server:
        if rank == 1:
            server.serve()
            return
        time.sleep(1)  # longer than any other wait may take
        server["t"].push({"x": torch.ones(1)})
        server.clock()
