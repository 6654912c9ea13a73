"""Pushes and pulls of one tensor by a worker: torch RPC, Gloo's messages, and tables of ours.

Run as a rank (`python -m measure.ps_rounds CONFIG`) it measures once and replies. Rank 0 is the
worker, rank 1 serves it where somebody has to; all sides take turns in the same two processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from measure.ps_ranks import Times, answer, ask_ranks, time_in_turns

_BYTES_PER_BLOCK = 64 << 20
_MOST_CALLS = 200
_held = torch.zeros(1)


@dataclass(frozen=True)
class PsCase:
    """`bytes`: of one fp32 tensor."""

    bytes: int
    rounds: int


def measure_ps(case: PsCase) -> Times:
    """Microseconds per call by side, one entry per round, measured in fresh processes."""
    found: Times = ask_ranks("measure.ps_rounds", case, 2)
    return found


def hold(numel: int) -> None:
    """On the server of RPC: makes what is pulled from it."""
    global _held
    _held = torch.zeros(numel)


def take(gradient: Tensor) -> None:
    """On the server of RPC: takes a push, and does nothing with it."""


def give() -> Tensor:
    return _held


@dataclass(frozen=True)
class _Sides:
    """What each rank calls; `worker` is timed, `server` answers as many calls."""

    worker: dict[str, Callable[[], object]]
    server: dict[str, Callable[[], object]]


def _gloo(rank: int, numel: int, group: Any) -> dict[str, Callable[[], object]]:
    tensor, answer = torch.zeros(numel), torch.zeros(1)

    def send(one: Tensor) -> None:
        dist.send(one, 1 - rank, group=group)

    def receive(one: Tensor) -> None:
        dist.recv(one, 1 - rank, group=group)

    first, second = (send, receive) if rank == 0 else (receive, send)

    def push() -> None:
        first(tensor)
        second(answer)

    def pull() -> None:
        first(answer)
        second(tensor)

    return {"gloo push": push, "gloo pull": pull}


def _ours(numel: int) -> tuple[dict[str, Callable[[], object]], list[Any]]:
    from trireme import ps

    sgd = ps.SGD(0.1)
    gradient = torch.zeros(numel)
    module = torch.nn.ParameterList([torch.zeros(numel)])
    loose = ps.ParameterServer(
        [ps.Dense("t", {"x": torch.zeros(numel)}, optimizer=sgd)], mode="async"
    )
    filled = torch.nn.ParameterList([torch.zeros(numel)])
    copied = ps.ParameterServer([ps.Dense("t", filled, optimizer=sgd)], mode="async")
    bound = ps.ParameterServer([ps.Dense("t", module, optimizer=sgd)])
    gradients = {"x": gradient}
    sides: dict[str, Callable[[], object]] = {
        "ours push": lambda: loose["t"].push(gradients),
        "ours pull": lambda: copied["t"].pull(),
        "ours pull, new tensors": lambda: loose["t"].pull(),
        "ours pull, bound": lambda: bound["t"].pull(),
    }
    return sides, [loose, copied, bound]


def _sides(case: PsCase, rank: int) -> tuple[_Sides, list[Any]]:
    numel = case.bytes // 4
    gloo = _gloo(rank, numel, dist.new_group(backend="gloo"))
    ours, servers = _ours(numel)
    source, target = torch.zeros(numel), torch.zeros(numel)
    worker = {
        "rpc push": lambda: rpc.rpc_sync("server", take, (source,)),
        "rpc pull": lambda: rpc.rpc_sync("server", give),
        **gloo,
        **ours,
        "copy": lambda: target.copy_(source),
    }
    return _Sides(worker, gloo), servers


def measure(fields: dict[str, Any]) -> Times:
    """The times of a case, on rank 0 of two."""
    case, rank = PsCase(**fields), dist.get_rank()
    rpc.init_rpc("server" if rank == 1 else "worker", rank=rank, world_size=2)
    sides, servers = _sides(case, rank)
    if rank == 0:
        rpc.rpc_sync("server", hold, (case.bytes // 4,))
    own = sides.worker if rank == 0 else sides.server
    calls = max(3, min(_MOST_CALLS, _BYTES_PER_BLOCK // case.bytes))
    found = time_in_turns(list(sides.worker), own, calls, case.rounds)
    for server in servers:
        server.close()
    rpc.shutdown()
    return found


if __name__ == "__main__":
    # RPC finds functions by the name of their module, which is another one than __main__.
    from measure.ps_rounds import measure as measured

    answer(measured)
