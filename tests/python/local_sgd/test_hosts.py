"""Workers of several ranks: hosts that are pretended, with a strategy inside of each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

from harness.faults import raises
from harness.models import Shapes, batch, mlp
from harness.on_ranks import on_gloo_ranks
from harness.pretended_hosts import on_hosts
from harness.training import assert_close
from local_sgd.simulation import Simulation
from local_sgd.workers import STRATEGIES, my_host, own, steps


def train(rank: int, world: int, name: str) -> None:
    group = my_host(rank, "2x2")
    model, net, optimizer = STRATEGIES[name](group)
    options: dict[str, Any] = {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1}
    rounds = trireme.DiLoCo(net, optimizer, **options)
    one = Simulation(2, 4, [fragment[0] for fragment in rounds._fragments], 1)
    with rounds:
        for step in range(8):
            steps(rank, net, optimizer, step, step + 1)
            one.train(step)
            theirs = one.models[rank // 2].parameters()
            for index, (mine, other) in enumerate(zip(model.parameters(), theirs, strict=True)):
                assert_close(f"step {step}, parameter {index}", own(mine), other)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_inside_a_worker(name: str) -> None:
    """Two workers of two ranks do what two workers in one process do."""
    on_hosts("2x2", train, name)


@pytest.mark.parametrize("name", ["ddp", "zero 2", "fully_shard"])
@on_gloo_ranks(4)
def test_a_mesh_of_workers(rank: int, name: str) -> None:
    """Where no memory is shared, and ranks are all on one host."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "ranks"))
    model, net, optimizer = STRATEGIES[name](mesh["ranks"].get_group())
    options: dict[str, Any] = {"sync_every": 2, "across": mesh["workers"]}
    one = Simulation(2, 2)
    with trireme.DiLoCo(net, optimizer, **options):
        for step in range(4):
            steps(rank, net, optimizer, step, step + 1)
            one.train(step)
    theirs = one.models[rank // 2].parameters()
    for index, (mine, other) in enumerate(zip(model.parameters(), theirs, strict=True)):
        assert_close(f"parameter {index}", own(mine), other)
    _, net, optimizer = STRATEGIES[name](mesh["ranks"].get_group())
    wrong = dist.new_group([0, 3]), dist.new_group([1, 2])
    with raises(ValueError, "rank 0 of a worker of 2", "rank 1 of a worker of 2"):
        trireme.DiLoCo(net, optimizer, sync_every=2, across=wrong[rank in (1, 2)])


def average(rank: int, world: int, name: str) -> None:
    group = my_host(rank, "2x2")
    model, net, optimizer = STRATEGIES[name](group)
    with trireme.LocalSGD(net, optimizer, sync_every=2) as rounds:
        rounds.set_weight(rank // 2)  # all of the second worker
        before = copy.deepcopy([own(param).detach() for param in model.parameters()])
        steps(rank, net, optimizer, 0, 2)
    after = [own(param).detach() for param in model.parameters()]
    for index, value in enumerate(after):
        of_second = value.clone()
        dist.broadcast(of_second, 2)
        assert torch.equal(value, of_second) and not torch.equal(value, before[index])


@pytest.mark.parametrize("name", ["ddp", "zero 2", "fully_shard"])
def test_local_sgd_over_workers(name: str) -> None:
    on_hosts("2x2", average, name)


def weigh_differently(rank: int, world: int) -> None:
    """Who fails tells the others, who may hear of it before they compare."""
    _, net, optimizer = STRATEGIES["ddp"](my_host(rank, "2x2"))
    both: Any = (ValueError, dist.DistBackendError)
    rounds = trireme.LocalSGD(net, optimizer, sync_every=1)
    with raises(both, "set_weight(1)", "set_weight(2)"), rounds:
        rounds.set_weight(1 + rank % 2)
        steps(rank, net, optimizer, 0, 1)


def test_ranks_of_a_worker_have_one_weight() -> None:
    on_hosts("2x2", weigh_differently)


def uneven(rank: int, world: int) -> None:
    group = my_host(rank, "1+3")
    _, net, optimizer = STRATEGIES["ddp"](group)
    with raises(ValueError, "across=None", "different numbers of ranks"):
        trireme.LocalSGD(net, optimizer, sync_every=1)
    model = Shapes()
    optimizer = SGD([param for param in model.parameters() if param.numel()], lr=0.1)
    with trireme.LocalSGD(model, optimizer, sync_every=1, across=dist.group.WORLD):
        model(batch(0)[rank::world]).square().mean().backward()
        optimizer.step()
    for param in model.parameters():
        first = param.detach().contiguous().clone()
        dist.broadcast(first, 0)
        assert torch.equal(param, first)


def test_uneven_hosts() -> None:
    """Nobody is across by place; each rank may be a worker."""
    on_hosts("1+3", uneven)


def refuse(rank: int, world: int) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with raises(ValueError, "across=None", "on this host"):
        trireme.LocalSGD(model, optimizer, sync_every=1)
    group = my_host(rank, "2x2")
    net = trireme.DistributedDataParallel(model, process_group=group)
    wrong = 1 if rank != 3 else 2
    with raises(ValueError, "sync_every=1", "sync_every=2"):
        trireme.LocalSGD(net, optimizer, sync_every=wrong)


def test_refused_over_hosts() -> None:
    """Ranks that nobody keeps equal; one rank of four with other options."""
    on_hosts("2x2", refuse)
