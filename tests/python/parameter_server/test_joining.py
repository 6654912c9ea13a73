"""Workers that join a server which runs: their clocks, what they see and push, and how they go.

Rank 2 is in no group of the others: it knows their Store alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from trireme import ps

from harness.deaths import Death, run_deaths
from harness.faults import kill_this_rank, raises
from harness.meeting import process_of, say, state_of, stay_until, store, until
from harness.models import mlp
from harness.on_ranks import AGES_S, on_shm_ranks
from parameter_server.counts import push_and_clock, table_of_counts

MODES = pytest.mark.parametrize("mode", ["bsp", "ssp", "async"])


def tables() -> list[ps.Dense | ps.Sparse]:
    return [
        table_of_counts(),
        ps.Sparse("items", 3, optimizer=ps.Sum(), reduction="sum"),
    ]


def two_ranks() -> dist.ProcessGroup | None:
    """A group of ranks 0 and 1; rank 2 gets none."""
    group = dist.new_group([0, 1], backend="trireme")
    return None if dist.get_rank() == 2 else group


def begun(clocks: int, made: list[ps.Dense | ps.Sparse], **options: Any) -> ps.ParameterServer:
    """Ranks 0 and 1 make a server and go on for some clocks; then rank 2 joins it."""
    group = two_ranks()
    if group is None:
        server = ps.join(store())
        say("joined")
    else:
        server = ps.ParameterServer(made, group=group, **options)
        for _ in range(clocks):
            push_and_clock(server)
            server["counts"].pull()
        dist.barrier(group)
        if group.rank() == 0:
            server.accept(store())
    stay_until("joined")
    return server


@MODES
@on_shm_ranks(3, timeout=60, patience_s=AGES_S)
def test_a_worker_joins_at_the_slowest_clock(rank: int, mode: str) -> None:
    server = begun(3, tables(), mode=mode)
    assert server.worker == rank and server.workers == 3
    counts, items = server["counts"], server["items"]
    assert server.clocks() == [3, 3, 3] and counts.pull()["x"].item() == 6
    say(f"rank {rank} has seen the clocks")
    stay_until(*(f"rank {peer} has seen the clocks" for peer in range(3)))
    ids = torch.tensor([7, 8 + rank, 7])
    for clock in range(3, 6):
        counts.push({"x": torch.ones(1)})
        items.push(ids, torch.ones(3, 3))
        assert server.clock() == clock + 1
    say(f"rank {rank} has pushed")
    stay_until(*(f"rank {peer} has pushed" for peer in range(3)))
    assert counts.pull()["x"].item() == 6 + 9
    assert torch.equal(items.pull(torch.tensor([7]))[0], torch.full((3,), 18.0))
    assert items.ids().tolist() == [7, 8, 9, 10] and len(items) == 4
    say(f"rank {rank} has pulled")
    stay_until(*(f"rank {peer} has pulled" for peer in range(3)))
    server.close()


@on_shm_ranks(3, timeout=60, patience_s=AGES_S)
def test_a_mean_is_over_those_that_were_there(rank: int) -> None:
    """SGD(1) on the mean of what workers push: two of them at first, then three, then two."""
    made: list[ps.Dense | ps.Sparse] = [
        ps.Dense("w", {"x": torch.zeros(1)}, optimizer=ps.SGD(lr=1.0)),
        *tables()[:1],
    ]
    server = begun(2, made)
    pushed = torch.tensor([[6.0], [12.0], [24.0]])[rank]
    value = lambda: server["w"].pull()["x"].item()  # noqa: E731
    assert value() == 0
    server["w"].push({"x": pushed})
    server.clock()
    assert value() == -14  # (6 + 12 + 24) / 3
    if rank == 2:
        server.leave()
        return
    server["w"].push({"x": pushed})
    server.clock()
    assert value() == -14 - 9
    server.close()


@on_shm_ranks(3, timeout=60, patience_s=AGES_S)
def test_the_module_of_a_table_is_with_others(rank: int) -> None:
    """Who joins pulls its tensors by name; DDP's mean over three gradients is the oracle."""
    net, expected = mlp(), mlp()
    names = [name for name, _ in net.named_parameters()]
    made: list[ps.Dense | ps.Sparse] = [
        ps.Dense("net", net, optimizer=ps.SGD(lr=0.5)), *tables()[:1],
    ]  # fmt: skip
    server = begun(1, made)
    table = server["net"]
    inputs = torch.arange(18.0).view(3, 6) / 10
    sgd = torch.optim.SGD(expected.parameters(), lr=0.5)
    own = net if rank < 2 else mlp()
    for _ in range(3):
        if rank == 2:
            with torch.no_grad():
                for name, tensor in table.pull().items():
                    own.get_parameter(name).copy_(tensor)
        else:
            table.pull()
        own(inputs[rank : rank + 1]).square().mean().backward()
        if rank == 2:
            table.push({name: own.get_parameter(name).grad for name in names})
            own.zero_grad()
        else:
            table.push()
        server.clock()
        sgd.zero_grad()
        (sum(expected(rows[None]).square().mean() for rows in inputs) / 3).backward()
        sgd.step()
    found = table.pull() if rank == 2 else None
    if found is None:
        table.pull()
        found = dict(net.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-6)
    if rank < 2:
        with raises(ValueError, "which has no module to write"), trireme.writing(net):
            raise AssertionError("it may not be written")
    say(f"rank {rank} is done")
    stay_until(*(f"rank {peer} is done" for peer in range(3)))
    server.close()


@on_shm_ranks(3, timeout=60, patience_s=AGES_S)
def test_embeddings_of_a_worker_that_has_joined(rank: int) -> None:
    server = begun(1, tables(), mode="async")
    rows = ps.Embedding(server["items"])
    rows(torch.tensor([rank])).sum().backward()
    assert torch.equal(server["items"].pull(torch.tensor(rank)), torch.ones(3))
    say(f"rank {rank} is done")
    stay_until(*(f"rank {peer} is done" for peer in range(3)))
    server.close()


@on_shm_ranks(3, timeout=60, patience_s=AGES_S)
def test_what_a_worker_that_has_joined_may_not_do(rank: int, tmp_path: Any) -> None:
    net = nn.Linear(2, 1)
    made: list[ps.Dense | ps.Sparse] = [ps.Dense("net", net, optimizer=ps.SGD()), *tables()[:1]]
    server = begun(1, made)
    if rank == 2:
        with raises(RuntimeError, "load: got a worker that has joined, expected a rank of the"):
            server.load("nowhere")
        with raises(RuntimeError, "serve: got a rank that works"):
            server.serve()
        server.leave()
        say("left")
    stay_until("left")
    if rank < 2:
        stats = server.stats()
        assert 2 in stats["left"] and stats["clocks"] == [1, 1, 1], stats
    server.close()


def outlive(rank: int, mode: str, on_worker_loss: str) -> None:
    server = begun(1, tables(), mode=mode, on_worker_loss=on_worker_loss)
    if rank == 2:
        server["counts"].push({"x": torch.full((1,), 100.0)})
        kill_this_rank()
    until(lambda: state_of(process_of(2)) == "Z")
    if on_worker_loss == "raise":
        name = f"worker 2 (joined, process {process_of(2)}) has died at clock 1"
        with raises(dist.DistBackendError, name):
            while True:
                push_and_clock(server)
                server["counts"].pull()
        return
    for _ in range(3):
        push_and_clock(server)
        server["counts"].pull()
    say(f"rank {rank} has pushed")
    stay_until("rank 0 has pushed", "rank 1 has pushed")
    until(lambda: bool(server["counts"].pull()) and server.stats()["lost"] == [2])
    assert server["counts"].pull()["x"].item() == 8 + (0 if mode == "bsp" else 100)
    server.close()


def test_a_worker_that_has_joined_is_killed() -> None:
    modes, losses = ("bsp", "ssp", "async"), ("raise", "continue")
    deaths = [Death(2, (mode, on_worker_loss)) for mode in modes for on_worker_loss in losses]
    run_deaths(outlive, 3, deaths, timeout=120)


@on_shm_ranks(3, timeout=60, patience_s=AGES_S)
def test_the_last_worker_saves(rank: int, tmp_path: Any) -> None:
    """Who has joined goes on alone, and saves what a server of ranks loads."""
    server = begun(2, tables())
    path = store_path(tmp_path)
    if rank < 2:
        server.close()
        stay_until("saved")
        return
    until(lambda: server.stats()["left"] == [0, 1])
    push_and_clock(server)
    server["items"].push(torch.tensor([5]), torch.ones(1, 3))
    server.clock()
    server.save(path)
    assert server["counts"].pull()["x"].item() == 5
    say("saved")
    server.close()


def store_path(tmp_path: Any) -> str:
    return str(tmp_path / "saved")


@on_shm_ranks(3, timeout=60, patience_s=AGES_S)
def test_a_store_without_a_server(rank: int) -> None:
    if rank == 2:
        empty = dist.PrefixStore("empty", store())
        empty.set_timeout(timedelta(seconds=0.3))
        key = "trireme/ps/invitation"
        with pytest.raises(dist.DistBackendError, match=rf"\[store\] got no answer about '{key}'"):
            ps.join(empty)
        for text, got in (
            ("{}", "a text that no server has left"),
            ('{"layout": "0.0"}', "a server of Trireme 0.0, expected"),
        ):
            empty.set(key, text)
            with pytest.raises(ValueError, match=rf"^\[ps\] join: got {got}"):
                ps.join(empty)
    dist.barrier()
