"""What the callee does for torch RPC and for us, in both cases the same functions.

They have a module of their own since RPC finds a function by the name of its module, which must not
be `__main__`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

BATCH = 4  # calls that are served at once
STATE, ACTIONS = 4, 2  # sizes of what an observer sends, and of what it gets


class Waitable(Protocol):
    """Is what both libraries return for a call that is under way."""

    def wait(self) -> object: ...


def give_back(tensor: Tensor) -> Tensor:
    return tensor


class SeededLinear(nn.Linear):
    """A layer with the same parameters wherever it is made."""

    def __init__(self, width: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(width)
            super().__init__(width, width)


def decide(states: Sequence[Tensor]) -> list[Tensor]:
    """What a small agent does with the states of several observers."""
    with torch.no_grad():
        return list(_policy(torch.stack(tuple(states))).unbind())


_policy = nn.Linear(STATE, ACTIONS)


class _Gathering:
    """Keeps calls until they are enough, as the tutorial's agent does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Tensor, Future[Tensor]]] = []

    def add(self, state: Tensor) -> Future[Tensor]:
        answered: Future[Tensor] = Future()
        with self._lock:
            self._waiting.append((state, answered))
            if len(self._waiting) < BATCH:
                return answered
            full, self._waiting = self._waiting, []
        for (_, future), action in zip(full, decide([state for state, _ in full]), strict=True):
            future.set_result(action)
        return answered


_gathering = _Gathering()


@rpc.functions.async_execution
def act(state: Tensor) -> Future[Tensor]:
    """Answers when as many calls as a batch has are there."""
    return _gathering.add(state)


def keep_in_flight(start: Callable[[], Waitable], calls: int, in_flight: int) -> None:
    """Makes `calls` calls, that many of them under way at most, and waits for all.

    Both numbers are whole batches, and new calls are made by the batch. So callers that wait have
    made whole batches, of which the callee keeps nothing back, in whichever order it got them.
    """
    pending: deque[Waitable] = deque()
    for _ in range(0, calls, BATCH):
        if len(pending) == in_flight:
            _wait_for(pending, BATCH)
        pending.extend(start() for _ in range(BATCH))
    _wait_for(pending, len(pending))


def _wait_for(pending: deque[Waitable], count: int) -> None:
    for _ in range(count):
        pending.popleft().wait()
