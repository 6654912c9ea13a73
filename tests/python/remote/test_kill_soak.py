"""Ranks are killed at random moments, whatever they do then, and groups begin anew: nobody hangs.

TRIREME_REMOTE_SOAK_S is how many seconds all of it takes, 30 if it is not set; `make soak` sets it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trireme import ps, remote

from harness.meeting import process_of, say, state_of, stay_until, until
from harness.on_ranks import AGES_S, on_shm_ranks
from remote.functions import echo

WORLD = 3
SEEDS = 3
SOAK_S = float(os.environ.get("TRIREME_REMOTE_SOAK_S", "30")) / SEEDS
LAST_S = 0.4  # a victim lives at most so long
AFTER = 30  # calls of a survivor after the death
AT_MOST_S = 5.0  # one call


@remote.function
def pass_on(value: Any, way: list[str]) -> Any:
    return remote.call(way[0], pass_on, value, way[1:]) if way else value


@remote.function
def make_net(to: str = "") -> nn.Module:
    inner = [remote.Module(to, make_net)] if to else []
    return nn.Sequential(nn.Linear(8, 8), *inner)


class Sum(remote.Object):
    def __init__(self) -> None:
        self.total = 0

    @remote.method
    def add(self, count: int) -> int:
        self.total += count
        return self.total

    @remote.method
    def add_at(self, other: remote.Ref, count: int) -> int:
        return other.add(count)


Work = Callable[[random.Random], None]


def small(drawn: random.Random) -> None:
    value = {"a": [1, "x"], "t": torch.ones(3)}
    assert list(remote.call(one_of(drawn), echo, value)) == ["a", "t"]


def many(drawn: random.Random) -> None:
    to = one_of(drawn)
    pending = [remote.call_async(to, echo, number) for number in range(50)]
    assert [call.wait() for call in pending] == list(range(50))


def large(drawn: random.Random) -> None:
    tensor = torch.arange(drawn.choice([1000, 300_000, 2_000_000]))
    assert torch.equal(remote.call(one_of(drawn), echo, tensor), tensor)


def around(drawn: random.Random) -> None:
    way = [one_of(drawn) for _ in range(4)]
    assert remote.call(way[0], pass_on, "it", way[1:]) == "it"


def objects(drawn: random.Random) -> None:
    one, other = remote.create(one_of(drawn), Sum), remote.create(one_of(drawn), Sum)
    assert one.add(2) == 2 and one.add_at(other, 3) == 3 and other.add(1) == 4


def train(drawn: random.Random) -> None:
    inner = drawn.choice(["", one_of(drawn)])
    net = remote.Module(one_of(drawn), make_net, inner, optimizer=ps.SGD(0.1))
    x = torch.ones(2, 8, requires_grad=True)
    outs: list[Tensor] = [net(x) for _ in range(3)]  # two of them are dropped
    outs[0].sum().backward()
    net.step()
    net.zero_grad()
    assert x.grad is not None and "0.weight" in net.state_dict()


WORK: list[Work] = [small, many, large, around, objects, train]


def one_of(drawn: random.Random) -> str:
    return f"p{drawn.randrange(WORLD)}"


def work(drawn: random.Random, victim: int) -> None:
    """Some work; it may end because the victim is dead, and for no other reason."""
    began = time.monotonic()
    try:
        drawn.choice(WORK)(drawn)
    except dist.DistBackendError as error:
        assert f"p{victim}" in str(error), str(error)
        until(lambda: state_of(process_of(victim)) == "Z", 2)
    assert time.monotonic() - began < AT_MOST_S


@on_shm_ranks(WORLD)
def killed_at_random(rank: int, seed: int, victim: int) -> None:
    remote.start(f"p{rank}", threads=1 + seed % 3)
    dist.barrier()
    drawn = random.Random(WORLD * seed + rank)
    if rank == victim:
        # SIGALRM ends a process that has no handler.
        signal.setitimer(signal.ITIMER_REAL, drawn.uniform(0.001, LAST_S))
        while True:
            small(drawn) if drawn.random() < 0.5 else work(drawn, victim)
    process = process_of(victim)
    while state_of(process) != "Z":
        work(drawn, victim)
    for _ in range(AFTER):
        work(drawn, victim)
    survivors = [peer for peer in range(WORLD) if peer != victim]
    assert remote.call(f"p{survivors[0]}", echo, seed) == seed
    say(f"{rank} is done")
    stay_until(*(f"{survivor} is done" for survivor in survivors))
    for survivor in survivors:
        assert remote.call(f"p{survivor}", echo, survivor) == survivor
    remote.stop()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.timeout(SOAK_S + 60)
def test_groups_whose_ranks_are_killed(seed: int) -> None:
    drawn = random.Random(seed)
    began = time.monotonic()
    rounds = 0
    while rounds == 0 or time.monotonic() - began < SOAK_S:
        victim = drawn.randrange(WORLD)
        program: Any = killed_at_random.__wrapped__
        on_these = on_shm_ranks(WORLD, timeout=40, patience_s=AGES_S, dying=[victim])
        on_these(program)(seed=drawn.randrange(10**6), victim=victim)
        rounds += 1
    print(f"{rounds} groups")
