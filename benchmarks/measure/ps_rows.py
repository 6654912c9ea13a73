"""Rows of a sparse table that one worker pulls and pushes, beside torch's gather and scatter.

Run as a rank (`python -m measure.ps_rows CONFIG`) it measures once and replies. Rank 0 works on one
thread; rank 1 is the other worker of the tables, and does nothing meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from measure.ps_ranks import Call, Times, answer, ask_ranks, time_in_turns

BATCHES = 16  # they are enough that no call finds the rows of the last one in a cache

SELECT, ADD = "index_select", "index_add_"
PULL, PULL_BSP = "pull", "pull, bsp"
PUSH_SGD, PUSH_ROWWISE = "push, SGD", "push, RowwiseAdagrad"
PUSH_BSP = "push and clock, bsp, SGD"
NAMES = (SELECT, ADD, PULL, PUSH_SGD, PUSH_ROWWISE, PULL_BSP, PUSH_BSP)


@dataclass(frozen=True)
class RowsCase:
    """A table of `rows` rows of `dim` elements in fp32; each call is about `ids` of them."""

    rows: int = 100_000
    dim: int = 64
    ids: int = 4096
    calls: int = 50
    rounds: int = 7


def measure_rows(case: RowsCase) -> Times:
    """Microseconds per call by side, one entry per round, measured in fresh processes."""
    found: Times = ask_ranks("measure.ps_rows", case, 2)
    return found


def _batches(case: RowsCase) -> Iterator[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    batches = [torch.randint(case.rows, (case.ids,), generator=drawn) for _ in range(BATCHES)]
    return itertools.cycle(batches)


def _torch_sides(case: RowsCase, gradients: Tensor) -> dict[str, Call]:
    weight, ids = torch.zeros(case.rows, case.dim), _batches(case)
    return {
        SELECT: lambda: weight.index_select(0, next(ids)),
        ADD: lambda: weight.index_add_(0, next(ids), gradients),
    }


def _loose_server(case: RowsCase) -> Any:
    from trireme import ps

    tables = [
        ps.Sparse("sgd", case.dim, optimizer=ps.SGD(0.1)),
        ps.Sparse("rowwise", case.dim, optimizer=ps.RowwiseAdagrad(0.1)),
    ]
    return ps.ParameterServer(tables, mode="async")


def _bsp_sides(case: RowsCase, gradients: Tensor, group: Any) -> dict[str, Call]:
    """One worker, whose clocks are committed at once."""
    from trireme import ps

    server = ps.ParameterServer([ps.Sparse("sgd", case.dim, optimizer=ps.SGD(0.1))], group=group)
    table, ids = server["sgd"], _batches(case)
    table.pull(torch.arange(case.rows))

    def push() -> None:
        table.push(next(ids), gradients)
        server.clock()

    return {PULL_BSP: lambda: table.pull(next(ids)), PUSH_BSP: push}


def measure(fields: dict[str, Any]) -> Times:
    """The times of a case, on rank 0 of two."""
    case = RowsCase(**fields)
    loose = _loose_server(case)
    alone = dist.new_group([0])
    own: dict[str, Call] = {}
    if dist.get_rank() == 0:
        gradients, ids = torch.full((case.ids, case.dim), 1e-3), _batches(case)
        sgd, rowwise = loose["sgd"], loose["rowwise"]
        for table in (sgd, rowwise):
            table.pull(torch.arange(case.rows))  # all rows come into being
        own = {
            **_torch_sides(case, gradients),
            PULL: lambda: sgd.pull(next(ids)),
            PUSH_SGD: lambda: sgd.push(next(ids), gradients),
            PUSH_ROWWISE: lambda: rowwise.push(next(ids), gradients),
            **_bsp_sides(case, gradients, alone),
        }
    found = time_in_turns(NAMES, own, case.calls, case.rounds)
    loose.close()
    return found


if __name__ == "__main__":
    answer(measure)
