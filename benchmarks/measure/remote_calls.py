"""Calls of a function with one tensor that comes back: torch RPC, ours, and messages of ours.

Run as a rank (`python -m measure.remote_calls CONFIG`) it measures once and replies. Rank 0 calls,
rank 1 serves; all sides take turns in the same two processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from measure import memory
from measure.ps_ranks import Call, Times, answer, ask_ranks, time_in_turns

NAMES = ("caller", "callee")  # rank 0 is the caller
SIDES = ("rpc", "ours", "send and recv", "copy")


@dataclass(frozen=True)
class CallsCase:
    """`bytes`: of one fp32 tensor, that goes and comes. `calls`: per side and round."""

    bytes: int
    calls: int
    rounds: int


def measure_calls(case: CallsCase) -> Times:
    """Microseconds per call by side, one entry per round, measured in fresh processes."""
    found: Times = ask_ranks("measure.remote_calls", case, len(NAMES))
    return found


def _round_trip(rank: int, numel: int, group: Any) -> Call:
    """The same bytes there and back by messages, which both ranks call for."""
    sent, received = torch.zeros(numel), torch.zeros(numel)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(sent, 1, group=group)
        dist.recv(received, 1 - rank, group=group)
        if rank == 1:
            dist.send(received, 0, group=group)

    return there_and_back


def _caller_sides(numel: int) -> dict[str, Call]:
    from torch.distributed import rpc
    from trireme import remote

    from measure.remote_rpc import give_back

    tensor, target = torch.rand(numel), torch.empty(numel)

    def over_rpc() -> Tensor:
        returned: Tensor = rpc.rpc_sync("callee", give_back, (tensor,))
        return returned

    def ours() -> Tensor:
        returned: Tensor = remote.call("callee", give_back, tensor)
        return returned

    _check_equal({"rpc": over_rpc, "ours": ours}, tensor)
    return {"rpc": over_rpc, "ours": ours, "copy": lambda: target.copy_(tensor)}


def _check_equal(sides: dict[str, Callable[[], Tensor]], tensor: Tensor) -> None:
    for side, call in sides.items():
        if not torch.equal(call(), tensor):
            raise RuntimeError(f"[remote_calls] {side}: got another tensor than was sent")


def measure(fields: dict[str, Any]) -> Times:
    """The times of a case, on rank 0 of two."""
    from torch.distributed import rpc
    from trireme import remote

    from measure.remote_rpc import give_back

    case, rank = CallsCase(**fields), dist.get_rank()
    memory.keep_heap_warm()
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES))
    messages = _round_trip(rank, case.bytes // 4, dist.new_group())
    remote.function(give_back)
    remote.start(NAMES[rank])
    own = {"send and recv": messages}
    if rank == 0:
        own |= _caller_sides(case.bytes // 4)
    found = time_in_turns(SIDES, own, case.calls, case.rounds)
    remote.stop()
    rpc.shutdown()
    return found


if __name__ == "__main__":
    answer(measure)
