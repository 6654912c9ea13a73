"""How ranks of a test wait for each other: for words, processes, and what these are seen in."""

import contextlib
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from trireme import _C

# How long a rank waits for what other ranks of a test say.
PATIENCE_S = 30.0


@contextlib.contextmanager
def group_of_ranks(
    backend: str, timeout_s: float = PATIENCE_S, options: object = None
) -> Iterator[None]:
    """All ranks of this test, which has no other group of them; destroyed if nothing is raised."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, pg_options=options)
    tell_process(dist.get_rank())
    yield
    if not dist.is_initialized():  # the test is about how it ends
        return
    group = dist.group.WORLD
    dist.destroy_process_group()
    if backend == "gloo":
        _let_go_last(group)


def _let_go_last(group: Any) -> None:
    """Lets Gloo's own thread let go of its group first, if it holds it.

    The callback of a future tells whoever waits for it, and holds the group a moment longer. Were
    it the last to do so, Gloo's thread would join itself, and torch terminate the process. What
    the test has left holds it for good, and is not waited for.
    """
    gc.collect()
    deadline = time.monotonic() + 0.2
    while sys.getrefcount(group) > 3 and time.monotonic() < deadline:  # the caller, this, the call
        time.sleep(0.001)


def store() -> dist.Store:
    """The Store by which the ranks of this test have met."""
    return dist.distributed_c10d._get_default_store()


def tell_process(rank: int) -> None:
    """Lets other ranks ask for this one's process_of()."""
    store().set(f"process {rank}", str(os.getpid()))


def process_of(rank: int) -> int:
    return int(store().get(f"process {rank}"))


def set_timeout(timeout: float | timedelta, group: Any = None) -> None:
    """Gives a group, by default that of all ranks, another timeout: seconds, or a timedelta.

    A short one is set after ranks have met: on a busy machine they begin longer after each other.
    """
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 has a public name for it
        dist.distributed_c10d._set_pg_timeout(limit, group)


def meet_again(word: str, timeout_s: float) -> None:
    """In a new group of the same ranks; the one before may have failed."""
    met = dist.PrefixStore(word, store())
    backend, rank, world = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=met, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )
    tell_process(rank)


def say(word: str) -> None:
    """To ranks that stay until they hear it."""
    store().set(word, "yes")


def stay_until(*words: str) -> None:
    """Until other ranks have said these; meanwhile this one is there, and does nothing."""
    store().wait(list(words), timedelta(seconds=PATIENCE_S))


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    """Returns when that is so; asks every 10 ms."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """T is stopped; Z is dead, and so is who is there no more, or goes while it is read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def is_inside(pid: int, what: str) -> bool:
    """Says whether an onlooker sees it in a collective, or another wait, that holds this text."""
    for group in _C.examine_host([pid], timedelta(seconds=5), 1)["groups"]:
        for rank in group["ranks"]:
            begun = [
                operation for operation in rank["operations"] if operation["finished_s_ago"] is None
            ]
            places = [operation["operation"] for operation in begun] + [rank["waits_for"] or ""]
            if rank["pid"] == pid and any(place and what in place for place in places):
                return True
    return False


def until_inside(others: int | Iterable[int], what: str = "") -> None:
    """Until these ranks are seen in such a collective or wait, which this rank has to come to."""
    ranks = [others] if isinstance(others, int) else others
    processes = [process_of(rank) for rank in ranks]
    until(lambda: all(is_inside(process, what) for process in processes))
