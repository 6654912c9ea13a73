"""Calls that one callee serves several at a time: torch's `async_execution`, and ours.

Run as a rank (`python -m measure.remote_batches CONFIG`) it measures once and replies. The last
rank serves the others, and computes when as many calls as a batch has are there, whoever made
them. Every caller keeps equally many calls under way on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from measure import memory
from measure.ps_ranks import Call, Times, answer, ask_ranks, time_in_turns

SIDES = ("rpc", "ours")
CALLEE = "callee"


@dataclass(frozen=True)
class BatchCase:
    """`calls`: of one caller, per side and round. They are whole batches, as is `in_flight`."""

    calls: int
    rounds: int
    callers: int = 4
    in_flight: int = 16


def measure_batches(case: BatchCase) -> Times:
    """Microseconds per call by side, of all callers together, one entry per round, measured in
    fresh processes."""
    blocks: Times = ask_ranks("measure.remote_batches", case, case.callers + 1)
    calls = case.callers * case.calls
    return {side: [us / calls for us in times] for side, times in blocks.items()}


def _define() -> Any:
    """Tells our side what there is to call; returns what gives the agent to callers."""
    from trireme import remote

    from measure.remote_rpc import BATCH, decide

    class Agent(remote.Object):
        @remote.method(batch=BATCH)
        def act(self, states: Sequence[Tensor]) -> list[Tensor]:
            return decide(states)

    agent = Agent()

    @remote.function
    def find_agent() -> Any:
        return remote.here(agent)

    return find_agent


def _caller_sides(case: BatchCase, find_agent: Any) -> dict[str, Call]:
    from torch.distributed import rpc
    from trireme import remote

    from measure.remote_rpc import STATE, act, keep_in_flight

    state = torch.rand(STATE)
    agent = remote.call(CALLEE, find_agent)

    def over_rpc() -> None:
        keep_in_flight(lambda: rpc.rpc_async(CALLEE, act, (state,)), case.calls, case.in_flight)
        dist.barrier()

    def ours() -> None:
        keep_in_flight(lambda: agent.act.start(state), case.calls, case.in_flight)
        dist.barrier()

    return {"rpc": over_rpc, "ours": ours}


def measure(fields: dict[str, Any]) -> Times:
    """The times of a case, on rank 0: until all callers have all answers."""
    from torch.distributed import rpc
    from trireme import remote

    case, rank = BatchCase(**fields), dist.get_rank()
    memory.keep_heap_warm()
    name = CALLEE if rank == case.callers else f"caller-{rank}"
    rpc.init_rpc(name, rank=rank, world_size=case.callers + 1)
    find_agent = _define()
    remote.start(name)
    own: dict[str, Call] = dict.fromkeys(SIDES, dist.barrier)
    if rank < case.callers:
        own = _caller_sides(case, find_agent)
    found = time_in_turns(SIDES, own, 1, case.rounds)
    own.clear()
    remote.stop()
    rpc.shutdown()
    return found


if __name__ == "__main__":
    answer(measure)
