"""Ranks that die, one after another; who outlives a death meets the next rank to die.

    def outlive(rank: int, moment: str) -> None:
        if rank == 1:
            die_when_awaited()
        with raises(dist.DistBackendError, "rank 1", "has died"):
            dist.barrier()

    run_deaths(outlive, 3, [Death(1, ("before",)), Death(1, ("after",))])

A process dies but once: each death has one of its own, and the others are there for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from harness.faults import in_case, kill_this_rank, note_death, seconds_since_death
from harness.meeting import tell_process, until_inside
from harness.on_ranks import AGES_S
from harness.ranks import run_ranks

# A death is seen within a second; a busy machine gets one more.
SEEN_S = 2.0


@dataclass(frozen=True)
class Death:
    rank: int
    """Who dies, in a group of its own."""
    args: tuple[Any, ...] = ()
    """What the program is called with behind its rank."""
    hosts: str = ""
    """By rank, the host on which it says that it is."""


def run_deaths(
    program: Callable[..., Any],
    world: int,
    deaths: Sequence[Death],
    backend: str = "trireme",
    *,
    timeout: float = 60,
) -> list[list[Any]]:
    """Calls ``program(rank, *args)`` on ``world`` ranks for each death, in a new group.

    Returns by death and rank what the program does; None of who has died. The timeout of the groups
    is long: a program that waits for it ends with the stack of each rank.
    """
    dying = range(world - 1, world - 1 + len(deaths))
    given = (program, world, deaths, backend)
    lives = run_ranks(_live_through, world - 1 + len(deaths), *given, timeout=timeout, dying=dying)
    found = [list(results) for results in zip(*lives[: world - 1], strict=True)]
    for results, death in zip(found, deaths, strict=True):
        results.insert(death.rank, None)
    return found


def _live_through(
    number: int, program: Callable[..., Any], world: int, deaths: Sequence[Death], backend: str
) -> list[Any]:
    """The processes that die come behind those that do not, in the order of the deaths."""
    store, _, _ = next(rendezvous("env://"))
    turn = number - (world - 1)
    results = []
    for at, death in enumerate(deaths):
        if turn < 0:
            rank = number + (number >= death.rank)
        elif turn == at:
            rank = death.rank
        else:
            continue
        options = SimpleNamespace(host_partition=death.hosts[rank]) if death.hosts else None
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"death {at}", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=AGES_S),
            pg_options=options,
        )
        tell_process(rank)
        torch.manual_seed(0)
        with in_case(death):
            results.append(program(rank, *death.args))
            assert turn < 0, "nobody has died"
        dist.destroy_process_group()
    return results


def die(*_: Any) -> None:
    note_death()
    kill_this_rank()


def die_when_awaited(*_: Any) -> None:
    """As soon as all other ranks are seen in a collective or another wait."""
    until_inside(set(range(dist.get_world_size())) - {dist.get_rank()})
    die()


def assert_seen_soon(within_s: float = SEEN_S) -> None:
    assert seconds_since_death() < within_s
