"""Pushes and pulls of one tensor by a worker: torch RPC, Gloo's messages, and tables of ours.

Run as a rank (`python -m harness.ps_rounds CONFIG`) it measures once and replies. Rank 0 is the
worker, rank 1 serves it where somebody has to; all sides take turns in the same two processes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from harness.ranks import Launch, RankGroup
from harness.worker import take_over_stdout

_BYTES_PER_BLOCK = 64 << 20
_MOST_CALLS = 200
_held = torch.zeros(1)


@dataclass(frozen=True)
class PsCase:
    """`bytes`: of one fp32 tensor."""

    bytes: int
    rounds: int


def measure_ps(case: PsCase) -> dict[str, list[float]]:
    """Microseconds per call by side, one entry per round, measured in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch("ps", "harness.ps_rounds", json.dumps(asdict(case)), 2, 1, Path(scratch))
        with RankGroup(launch) as group:
            found: dict[str, list[float]] = group.replies()[0]
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


def _time_us(call: Callable[[], object] | None, calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    if call is not None:
        for _ in range(calls):
            call()
    took = (time.perf_counter() - start) / calls * 1e6
    dist.barrier()
    return took


def _measure(case: PsCase, rank: int) -> dict[str, list[float]]:
    sides, servers = _sides(case, rank)
    if rank == 0:
        rpc.rpc_sync("server", hold, (case.bytes // 4,))
    own = sides.worker if rank == 0 else sides.server
    names = list(sides.worker)
    calls = max(3, min(_MOST_CALLS, _BYTES_PER_BLOCK // case.bytes))
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        _time_us(own.get(name), 3)
    for number in range(case.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(_time_us(own.get(name), calls))
    for server in servers:
        server.close()
    return found


def main() -> None:
    """Measures what the first argument says and sends the times to the launcher."""
    replies = take_over_stdout()
    import trireme  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    dist.init_process_group("trireme")
    rank = dist.get_rank()
    rpc.init_rpc("server" if rank == 1 else "worker", rank=rank, world_size=2)
    found = _measure(PsCase(**json.loads(sys.argv[1])), rank)
    rpc.shutdown()
    print(json.dumps(found), file=replies)
    sys.stdin.readline()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # RPC finds functions by the name of their module, which is another one than __main__.
    from harness.ps_rounds import main as run

    run()
