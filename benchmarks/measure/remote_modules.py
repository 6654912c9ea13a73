"""Forward and backward of a layer that lives at the callee: torch's RemoteModule, and ours.

Run as a rank (`python -m measure.remote_modules CONFIG`) it measures once and replies. Rank 0
calls, rank 1 serves; all sides take turns in the same two processes. Each makes the gradients of
its input and of the parameters, and leaves nothing behind: torch's context forgets them at its end,
ours by zero_grad(). "ours, added up" leaves that out, so that gradients are added to those there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from measure import memory
from measure.ps_ranks import Times, answer, ask_ranks, time_in_turns
from measure.remote_calls import NAMES

SIDES = ("rpc", "ours", "ours, added up", "local")

Step = Callable[[], Tensor]  # returns the gradient of the input


@dataclass(frozen=True)
class ModuleCase:
    """`calls`: forwards with backward per side and round."""

    calls: int
    rounds: int
    width: int = 1024
    batch: int = 32


def measure_module(case: ModuleCase) -> Times:
    """Microseconds per forward and backward by side, one entry per round, in fresh processes."""
    found: Times = ask_ranks("measure.remote_modules", case, len(NAMES))
    return found


def make_layer(width: int) -> nn.Module:
    """The factory of our side."""
    from measure.remote_rpc import SeededLinear

    return SeededLinear(width)


def _over_rpc(case: ModuleCase, x: Tensor) -> Step:
    from torch.distributed import autograd as dist_autograd
    from torch.distributed.nn.api.remote_module import RemoteModule

    from measure.remote_rpc import SeededLinear

    net = RemoteModule("callee/cpu", SeededLinear, (case.width,))

    def step() -> Tensor:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [net(x).sum()])
            gradient: Tensor = dist_autograd.get_gradients(context)[x]
        return gradient

    return step


def _plain(net: nn.Module, x: Tensor, *, forgets: bool) -> Step:
    """A step by loss.backward(), of a module that may live anywhere."""

    def step() -> Tensor:
        x.grad = None
        net(x).sum().backward()
        if forgets:
            net.zero_grad()
        assert x.grad is not None
        return x.grad

    return step


def _caller_sides(case: ModuleCase) -> dict[str, Step]:
    from trireme import remote

    x = torch.rand(case.batch, case.width, requires_grad=True)
    nets = [remote.Module("callee", make_layer, case.width) for _ in range(2)]
    sides = {
        "rpc": _over_rpc(case, x),
        "ours": _plain(nets[0], x, forgets=True),
        "ours, added up": _plain(nets[1], x, forgets=False),
        "local": _plain(make_layer(case.width), x, forgets=True),
    }
    expected = sides["local"]()
    for side, step in sides.items():
        if not torch.equal(step(), expected):
            raise RuntimeError(f"[remote_modules] {side}: got another gradient than locally")
    return sides


def measure(fields: dict[str, Any]) -> Times:
    """The times of a case, on rank 0 of two."""
    from torch.distributed import rpc
    from trireme import remote

    case, rank = ModuleCase(**fields), dist.get_rank()
    memory.keep_heap_warm()
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES))
    remote.function(make_layer)
    remote.start(NAMES[rank])
    own = _caller_sides(case) if rank == 0 else {}
    found = time_in_turns(SIDES, own, case.calls, case.rounds)
    del own  # the modules, before those that serve them are gone
    remote.stop()
    rpc.shutdown()
    return found


if __name__ == "__main__":
    # RPC finds functions by the name of their module, which is another one than __main__.
    from measure.remote_modules import measure as measured

    answer(measured)
