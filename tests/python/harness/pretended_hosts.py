"""Ranks of the backend ``trireme`` that behave as if they were on several hosts."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from trireme import _C

from harness.meeting import group_of_ranks, process_of, stay_until, tell_process, until
from harness.on_ranks import AGES_S
from harness.ranks import run_ranks

# Says by rank the host that it says it is on.
LAYOUTS = {
    **{"2x2": "aabb", "apart": "abab", "1+3": "abbb", "1+1+2": "abcc", "alone": "abc"},
    **{"4": "aaaa", "2+3": "aabbb", "1+4": "abbbb", "3+2 apart": "ababa"},
    **{"3+3": "aaabbb", "2+2+2": "aabbcc"},
}
SOME_LAYOUTS = ("2x2", "1+3", "1+1+2")


def place_of(rank: int, layout: str) -> Any:
    return SimpleNamespace(host_partition=LAYOUTS[layout][rank])


def join(rank: int, layout: str, timeout_s: float = AGES_S) -> Any:
    options = place_of(rank, layout)
    dist.init_process_group("trireme", timeout=timedelta(seconds=timeout_s), pg_options=options)
    tell_process(rank)
    return options


def until_entered(others: Iterable[int], what: str = "") -> None:
    """Until these have said that they come, and are seen in what this rank has to come to.

    A rank that is alone on its host, or waits for another host, is seen in what it entered before.
    """
    ranks = list(others)
    stay_until(*(f"{rank} comes" for rank in ranks))
    until(lambda: all(has_entered(process_of(rank), what) for rank in ranks))


def has_entered(process: int, what: str) -> bool:
    for group in _C.examine_host([process], timedelta(seconds=5), 1)["groups"]:
        for rank in group["ranks"]:
            if rank["pid"] == process and len(group["ranks"]) > 1:
                return any(what in operation["operation"] for operation in rank["operations"])
    return True


def under(rank: int, layout: str, program: Callable[..., Any], args: Sequence[Any]) -> Any:
    with group_of_ranks("trireme", AGES_S, place_of(rank, layout)):
        torch.manual_seed(0)
        return program(rank, dist.get_world_size(), *args)


def on_hosts(layout: str, program: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
    return run_ranks(under, len(LAYOUTS[layout]), layout, program, args, timeout=timeout)
