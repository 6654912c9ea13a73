"""Checkpoints in mid-round, with a fragment on its way: bit for bit; other numbers of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch.optim import SGD, Adam
from trireme import compression as c

from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_ranks
from harness.pretended_hosts import on_hosts
from local_sgd.simulation import inner_optimizer, train
from local_sgd.workers import STRATEGIES, my_host, own, steps

METHODS = {
    "none": None,
    "int8": c.Int8(rounding="stochastic", dense_below=0),
    "top": c.TopK(1 / 8, chunk=64, decay=0.95, dense_below=0),
    "low rank": c.PowerSGD(2, start_step=1, dense_below=0, min_ratio=1),
}


def made(method: c.Compression | None) -> tuple[Any, Any, Any, Any]:
    model = mlp()
    optimizer = inner_optimizer(model)
    outer = Adam(model.parameters(), lr=0.05)
    rounds = trireme.DiLoCo(
        model,
        optimizer,
        outer,
        sync_every=6,
        fragments=2,
        fragment_sync_delay=2,
        fragment_update_alpha=0.25,
        across=dist.group.WORLD,
        compression=method,
    )
    return model, optimizer, outer, rounds


@pytest.mark.parametrize("name", METHODS)
@on_ranks()
def test_goes_on_bit_for_bit(rank: int, name: str, tmp_path: Path) -> None:
    """Step 7 is the first of a round, whose fragment leaves after it."""
    model, optimizer, _, rounds = made(METHODS[name])
    with rounds:
        for step in range(7):
            train(model, optimizer, step, rank, 2)
        rounds.set_weight(1 + rank)
        save = trireme.save_checkpoint(
            tmp_path / "saved", model, optimizer, rounds=rounds, extra={"step": 7}
        )
        assert save.done()
        for step in range(7, 14):
            train(model, optimizer, step, rank, 2)
    again, its_optimizer, outer, its_rounds = made(METHODS[name])
    extra = trireme.load_checkpoint(tmp_path / "saved", again, its_optimizer, rounds=its_rounds)
    assert extra == {"step": 7}
    with its_rounds:
        for step in range(7, 14):
            train(again, its_optimizer, step, rank, 2)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert outer.state[next(again.parameters())]["step"] == 2


@on_ranks(3)
def test_another_number_of_workers(rank: int, tmp_path: Path) -> None:
    """All begin at the anchor, which is what any other program loads, with fresh inner states."""
    pair = dist.new_group([0, 1])
    model = mlp()
    optimizer = inner_optimizer(model)
    if rank < 2:
        rounds = trireme.DiLoCo(model, optimizer, sync_every=4, across=pair)
        with rounds:
            for step in range(6):
                train(model, optimizer, step, rank, 2)
            trireme.save_checkpoint(
                tmp_path / "saved", model, optimizer, rounds=rounds, process_group=pair
            )
    dist.barrier()
    plain = mlp()
    trireme.load_checkpoint(tmp_path / "saved", plain)
    more = mlp()
    its_optimizer = inner_optimizer(more)
    its_rounds = trireme.DiLoCo(more, its_optimizer, sync_every=4, across=dist.group.WORLD)
    trireme.load_checkpoint(tmp_path / "saved", more, its_optimizer, rounds=its_rounds)
    for mine, other in zip(plain.parameters(), more.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert not its_optimizer.state
    with its_rounds:
        for step in range(4):
            train(more, its_optimizer, step, rank, 3)
    found = next(more.parameters()).detach().clone()
    dist.broadcast(found, 0)
    assert torch.equal(found, next(more.parameters()))


@on_ranks()
def test_a_plain_checkpoint_begins_rounds(rank: int, tmp_path: Path) -> None:
    model = mlp()
    optimizer = inner_optimizer(model)
    for step in range(2):
        train(model, optimizer, step, 0, 1)
    trireme.save_checkpoint(tmp_path / "plain", model, optimizer)
    other, its_optimizer, _, rounds = made(None)
    trireme.load_checkpoint(tmp_path / "plain", other, its_optimizer, rounds=rounds)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert its_optimizer.state[next(other.parameters())]["step"] == 2


@on_ranks()
def test_workers_agree_on_a_start_after_a_save(rank: int, tmp_path: Path) -> None:
    """One that comes before the block: its anchors are each worker's own."""
    model, optimizer, _, rounds = made(None)
    with torch.no_grad():
        for param in model.parameters():
            param += rank
    trireme.save_checkpoint(tmp_path / "saved", model, optimizer, rounds=rounds)
    with rounds:
        for mine, first in zip(model.parameters(), mlp().parameters(), strict=True):
            assert torch.equal(mine, first)


@on_ranks()
def test_refused(rank: int, tmp_path: Path) -> None:
    model, optimizer, _, rounds = made(None)
    with raises(TypeError, "rounds"):
        trireme.save_checkpoint(tmp_path / "saved", model, optimizer, rounds=model)
    with raises(ValueError, "another module or optimizer"):
        trireme.save_checkpoint(tmp_path / "saved", mlp(), rounds=rounds)
    with raises(ValueError, "another module or optimizer"):
        other = SGD(model.parameters(), lr=1)
        trireme.save_checkpoint(tmp_path / "saved", model, other, rounds=rounds)


def resume(rank: int, world: int, name: str, folder: str) -> None:
    group = my_host(rank, "2x2")
    runs = []
    for _ in range(2):
        model, net, optimizer = STRATEGIES[name](group)
        rounds = trireme.DiLoCo(
            net,
            optimizer,
            sync_every=4,
            fragments=2,
            fragment_sync_delay=1,
            compression=c.Int8(dense_below=0),
        )
        runs.append((model, net, optimizer, rounds))
    model, net, optimizer, rounds = runs[0]
    with rounds:
        steps(rank, net, optimizer, 0, 5)
        trireme.save_checkpoint(folder, net, optimizer, rounds=rounds)
        steps(rank, net, optimizer, 5, 9)
        expected = [own(param).detach().clone() for param in model.parameters()]
    model, net, optimizer, rounds = runs[1]
    trireme.load_checkpoint(folder, net, optimizer, rounds=rounds)
    with rounds:
        steps(rank, net, optimizer, 5, 9)
    for mine, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(own(mine), other)


@pytest.mark.parametrize("name", ["ddp", "zero 1", "zero 2", "fully_shard"])
def test_strategies_inside_a_worker_go_on(name: str, tmp_path: Path) -> None:
    on_hosts("2x2", resume, name, str(tmp_path / "saved"))
