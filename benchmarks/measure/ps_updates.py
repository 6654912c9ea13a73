"""Updates of a model by the pushes of all workers: torch's tutorial on batch RPC, and ours.

Run as a rank (`python -m measure.ps_updates CONFIG`) it measures once and replies. Ranks 0 to W - 1
are the workers of both sides. The last rank is the server of RPC: it takes the gradients of all
workers, makes one step, and answers each with the model, or with the rows that it asked for. Under
ours it sleeps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

from measure.ps_ranks import Call, Times, answer, ask_ranks, time_in_turns

SIDES = ("rpc", "ours")
LR, EPS = 0.01, 1e-10
BATCHES = 16  # each worker draws so many of ids


@dataclass(frozen=True)
class UpdatesCase:
    """`kind`: "dense", a model of a million parameters under SGD, or "sparse", `ids` of 100,000
    rows of 64 elements under rowwise Adagrad."""

    kind: str
    workers: int
    calls: int = 20
    rounds: int = 7
    width: int = 500
    rows: int = 100_000
    dim: int = 64
    ids: int = 4096


def measure_updates(case: UpdatesCase) -> Times:
    """Microseconds per update by side, one entry per round, measured in fresh processes."""
    found: Times = ask_ranks("measure.ps_updates", case, case.workers + 1)
    return found


# --- the server of RPC ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Push:
    """What one worker sends, and what it waits for."""

    tensors: list[Tensor]
    wants: Tensor | None
    answered: Future[list[Tensor]]


class _BatchedSteps:
    """Keeps pushes until all workers have sent one, as the tutorial's server does."""

    def __init__(self, case: UpdatesCase) -> None:
        self._case = case
        self._lock = threading.Lock()
        self._pushes: list[_Push] = []
        if case.kind == "dense":
            self._parameters = list(make_model(case).parameters())
            self._optimizer = torch.optim.SGD(self._parameters, lr=LR)
        else:
            self._weight = torch.zeros(case.rows, case.dim)
            self._sums = torch.zeros(case.rows)

    def take(self, tensors: list[Tensor], wants: Tensor | None) -> Future[list[Tensor]]:
        push = _Push(tensors, wants, Future())
        with self._lock:
            self._pushes.append(push)
            if len(self._pushes) < self._case.workers:
                return push.answered
            pushes, self._pushes = self._pushes, []
            self._step_dense(pushes) if self._case.kind == "dense" else self._step_rows(pushes)
        for waiting in pushes:
            waiting.answered.set_result(self._answer(waiting.wants))
        return push.answered

    def _answer(self, wants: Tensor | None) -> list[Tensor]:
        if wants is None:
            return [parameter.detach() for parameter in self._parameters]
        return [self._weight.index_select(0, wants)]

    def _step_dense(self, pushes: list[_Push]) -> None:
        for at, parameter in enumerate(self._parameters):
            total = pushes[0].tensors[at]
            for push in pushes[1:]:
                total += push.tensors[at]
            parameter.grad = total.div_(len(pushes))
        self._optimizer.step()

    def _step_rows(self, pushes: list[_Push]) -> None:
        ids, places = torch.cat([push.tensors[0] for push in pushes]).unique(return_inverse=True)
        total = torch.zeros(len(ids), self._case.dim)
        total.index_add_(0, places, torch.cat([push.tensors[1] for push in pushes]))
        total.div_(len(pushes))
        self._sums.index_add_(0, ids, total.square().mean(1))
        total.div_(self._sums[ids].sqrt_().add_(EPS).unsqueeze(1))
        self._weight.index_add_(0, ids, total, alpha=-LR)


_served: _BatchedSteps | None = None


def serve(fields: dict[str, Any]) -> None:
    """On the server: begins."""
    global _served
    _served = _BatchedSteps(UpdatesCase(**fields))


@rpc.functions.async_execution
def update(tensors: list[Tensor], wants: Tensor | None) -> Future[list[Tensor]]:
    """On the server: takes the push of one worker, and answers when the step is made."""
    assert _served is not None
    return _served.take(tensors, wants)


# --- workers -------------------------------------------------------------------------------------


def make_model(case: UpdatesCase) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2 * case.width, case.width), nn.Linear(case.width, 2 * case.width)
    )


def _batches(case: UpdatesCase) -> Iterator[Tensor]:
    drawn = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(case.rows, (case.ids,), generator=drawn) for _ in range(BATCHES)]
    return itertools.cycle(batches)


def _dense_sides(case: UpdatesCase, group: Any) -> dict[str, Call]:
    from trireme import ps

    model = make_model(case)
    server = ps.ParameterServer([ps.Dense("model", model, optimizer=ps.SGD(LR))], group=group)
    gradients = [torch.full_like(parameter, 1e-3) for parameter in model.parameters()]

    def ours() -> None:
        server["model"].pull()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        server["model"].push()
        server.clock()

    return {"rpc": lambda: rpc.rpc_sync("server", update, (gradients, None)), "ours": ours}


def _sparse_sides(case: UpdatesCase, group: Any) -> dict[str, Call]:
    from trireme import ps

    table = ps.Sparse("rows", case.dim, optimizer=ps.RowwiseAdagrad(LR), rows=case.rows)
    server = ps.ParameterServer([table], group=group)
    server["rows"].pull(torch.arange(case.rows))
    batches, gradients = _batches(case), torch.full((case.ids, case.dim), 1e-3)

    def over_rpc() -> None:
        ids, wants = next(batches), next(batches)
        rpc.rpc_sync("server", update, ([ids, gradients], wants))

    def ours() -> None:
        ids = next(batches)
        server["rows"].pull(ids)
        server["rows"].push(ids, gradients)
        server.clock()

    return {"rpc": over_rpc, "ours": ours}


MAKERS: dict[str, Callable[[UpdatesCase, Any], dict[str, Call]]] = {
    "dense": _dense_sides,
    "sparse": _sparse_sides,
}


def measure(fields: dict[str, Any]) -> Times:
    """The times of a case, on rank 0."""
    case, rank = UpdatesCase(**fields), dist.get_rank()
    name = "server" if rank == case.workers else f"worker-{rank}"
    rpc.init_rpc(name, rank=rank, world_size=case.workers + 1)
    group = dist.new_group(list(range(case.workers)))
    own: dict[str, Call] = {}
    if rank < case.workers:
        own = MAKERS[case.kind](case, group)
    else:
        serve(fields)
    found = time_in_turns(SIDES, own, case.calls, case.rounds)
    rpc.shutdown()
    return found


if __name__ == "__main__":
    # RPC finds functions by the name of their module, which is another one than __main__.
    from measure.ps_updates import measure as measured

    answer(measured)
