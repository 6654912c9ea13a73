"""What ranks hold under one strategy comes into another one in memory, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn

from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_gloo_ranks, on_shm_ranks
from harness.pretended_hosts import on_hosts
from harness.tensors import assert_bits
from harness.training import Training, assert_close
from saving.ranks import assert_holds, held, load, make, most_allocated, save, state_bytes


def move(source: Training | None, target: Training | None) -> None:
    """From ranks that hold ``source`` to those that need ``target``."""
    trireme.redistribute(
        None if source is None else source.net,
        None if target is None else target.net,
        None if source is None else source.optimizer,
        None if target is None else target.optimizer,
    )


def _trained(strategy: str, **options: Any) -> Training:
    training = make(strategy, **options)
    for step in range(2):
        training.train(step)
    training.optimizer.param_groups[0]["lr"] = 0.02
    return training


def _assert_goes_on(source: Training, target: Training) -> None:
    """``target`` is what ``source`` was, and trains on as one process does."""
    expected = held(source)
    move(source, target)
    assert target.optimizer.param_groups[0]["lr"] == 0.02
    assert_holds(target, expected)
    assert_holds(source, expected)
    one = make("plain", elsewhere=True)
    move(source, one)
    assert_holds(one, expected)
    for each in (target, one):
        each.train(2)
    after, alone = held(target), held(one)
    for name, _ in one.model.named_parameters():
        assert_close(name, after[name], alone[name])


@on_shm_ranks(2)
def test_every_strategy_becomes_every_other(rank: int) -> None:
    strategies = ("ddp", "zero1", "zero2", "fsdp")
    for before in strategies:
        source = _trained(before)
        for after in strategies:
            _assert_goes_on(source, make(after, elsewhere=True))


@on_gloo_ranks(3)
def test_over_gloo(rank: int) -> None:
    _assert_goes_on(_trained("fsdp"), make("ddp", elsewhere=True))
    _assert_goes_on(_trained("ddp"), make("fsdp", elsewhere=True))


@on_shm_ranks(4)
def test_other_ranks(rank: int) -> None:
    """From four to one that is not the first, and back; two of four have the optimizer's shards."""
    source = _trained("hsdp")
    expected = held(source)
    alone = make("plain", elsewhere=True) if rank == 2 else None
    move(source, alone)
    if alone is not None:
        assert_holds(alone, expected)
    again = make("fsdp", elsewhere=True)
    move(alone, again)
    assert_holds(again, expected)

    last_two = dist.new_group([2, 3])
    pair = None
    if rank >= 2:
        model = mlp()
        optimizer = trireme.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=last_two
        )
        pair = Training(model, model, optimizer, rank - 2, 2)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    one = make("plain", make_model=mlp, elsewhere=True)
    move(pair, one)
    states = [one.optimizer.state[parameter] for parameter in one.model.parameters()]
    assert all(state["step"].item() == 1 for state in states)
    assert all((state["exp_avg"] - 0.1).abs().max() < 1e-6 for state in states)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x[:, :5])


@on_shm_ranks(2)
def test_buffers_are_those_of_the_lowest_rank(rank: int) -> None:
    source, target = Normed(), Normed()
    source.norm.running_mean.fill_(rank + 1)
    for lowest in (0, 1):
        trireme.redistribute(source if rank >= lowest else None, target)
        assert target.norm.running_mean.tolist() == [lowest + 1] * 5


def test_alone_without_a_group() -> None:
    source, target = _trained("plain"), make("plain", elsewhere=True)
    move(source, target)
    assert_holds(target, held(source))


def _wide() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(128, 128, bias=False, dtype=torch.float64) for _ in range(8))
    return nn.Sequential(*layers)


@on_shm_ranks(2)
def test_no_rank_allocates_more_than_its_parts(rank: int) -> None:
    """The state that is made, and messages of a part: less than one of eight layers."""
    source = make("fsdp", make_model=_wide)
    rows = torch.ones(2, 128, dtype=torch.float64)
    source.net(rows).square().mean().backward()
    source.optimizer.step()
    target = make("fsdp", make_model=_wide, elsewhere=True)
    most = most_allocated(lambda: move(source, target))
    layer = 8 * 128 * 128
    assert state_bytes(target.optimizer) <= most <= state_bytes(target.optimizer) + layer


@on_shm_ranks(2)
def test_what_is_refused(rank: int) -> None:
    source, target = make("fsdp", make_model=mlp), make("ddp", make_model=mlp, elsewhere=True)
    before = held(target)
    for parts, both in (
        (("one module before and after",), (source.net, source.net)),
        (("got an optimizer without its module",), (None, target.net, source.optimizer)),
        (
            ("got a checkpoint without an optimizer",),
            (source.net, target.net, None, target.optimizer),
        ),
        (("got a checkpoint without '0.weight' in memory",), (nn.Linear(2, 2), target.net)),
        (("without model in memory",), (None, target.net)),
        (
            ("'0.weight' as Float of sizes [13, 6] in memory, expected Double",),
            (mlp(), mlp(torch.float64)),
        ),
    ):
        with raises(ValueError, *parts):
            trireme.redistribute(*both)
        assert_holds(target, before)
    # One of the holders says that it holds nothing.
    with raises(ValueError, "got no rank that holds '0.weight'[7:13, 0:6], which rank 0 needs"):
        trireme.redistribute(source.net if rank == 0 else None, target.net)
    assert_holds(target, before)
    move(source, target)
    assert_holds(target, held(source))


MESSAGE_NUMEL = (16 << 20) // 4


def _die_when(values: torch.Tensor) -> None:
    """Kills this process as soon as something is in ``values``."""
    while values[0].item() == 0:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


@on_shm_ranks(3, dying=[1])
def test_a_rank_killed_between_messages_is_named(rank: int) -> None:
    """It has got a first part of eight, and dies; all that wait for it or with it raise."""
    whole = nn.Linear(1, 8 * MESSAGE_NUMEL, bias=False)
    source = None
    if rank == 0:
        source = whole
        nn.init.ones_(source.weight)
    else:
        nn.init.zeros_(whole.weight)
    target = None if rank == 0 else whole
    if rank == 1:
        threading.Thread(target=_die_when, args=(whole.weight.detach().view(-1),)).start()
    with raises(dist.DistBackendError, "rank 1"):
        for _ in range(100):  # until the thread has seen it
            trireme.redistribute(source, target)


def _bytes_read() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


def _wide_ddp(**options: Any) -> Training:
    training = make("ddp", make_model=lambda: nn.Linear(1024, 257), **options)
    return training


@on_shm_ranks(3)
def test_read_once_reads_each_byte_once(rank: int, tmp_path: Path) -> None:
    """All three need all of it: one reads three times as much as it must, or its third."""
    path = str(tmp_path / "checkpoint")
    training = _wide_ddp()
    training.net(torch.ones(2, 1024)).sum().backward()
    training.optimizer.step()
    save(training, path)
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    for read_once, least, most in ((False, 3.0, 3.1), (True, 1.0, 1.1)):
        fresh = _wide_ddp(elsewhere=True)
        begin = _bytes_read()
        trireme.load_checkpoint(path, fresh.net, fresh.optimizer, read_once=read_once, verify=False)
        read = torch.tensor([_bytes_read() - begin])
        dist.all_reduce(read)
        assert least * size <= read.item() <= most * size
        for got, expected in zip(
            fresh.model.state_dict().values(), training.model.state_dict().values(), strict=True
        ):
            assert_bits(got, expected)
        for ours, theirs in zip(fresh.model.parameters(), training.model.parameters(), strict=True):
            for key, value in training.optimizer.state[theirs].items():
                assert_bits(fresh.optimizer.state[ours][key], value, key)


@on_shm_ranks(4)
def test_read_once_under_strategies(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    source = _trained("fsdp")
    save(source, path)
    expected = held(source)
    for strategy in ("ddp", "zero2", "fsdp", "hsdp"):
        fresh = make(strategy, elsewhere=True)
        trireme.load_checkpoint(path, fresh.net, fresh.optimizer, read_once=True)
        assert_holds(fresh, expected)
    again = make("ddp", elsewhere=True)
    load(again, path)
    assert_holds(again, expected)


def _over_hosts(rank: int, world: int) -> None:
    source = _trained("fsdp")
    expected = held(source)
    everywhere = make("ddp", elsewhere=True)
    move(source, everywhere)  # broadcast
    assert_holds(everywhere, expected)
    alone = make("plain", elsewhere=True) if rank == 0 else None
    move(everywhere if rank < 2 else None, alone)  # by a rank of its host: itself
    there = make("plain", elsewhere=True) if rank >= 2 else None
    move(alone, there)  # to one rank of the other host, which forwards it
    for training in (alone, there):
        if training is not None:
            assert_holds(training, expected)


def test_over_hosts() -> None:
    on_hosts("2x2", _over_hosts)
