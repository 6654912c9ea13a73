"""The threads of a pipeline in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trireme import _C
from trireme._C import WorkerPool
from trireme._core.worker_threads import start_threads
from trireme._pipeline import refuse
from trireme._pipeline.schedule import PipelineSchedule
from trireme._pipeline.stages import Balance


def rows_of(
    devices: Sequence[torch.device | str | int] | None,
    balance: Balance,
    schedule: str | PipelineSchedule,
    layers: int,
) -> int:
    """Returns how many rows the schedule of a pipeline in one process has."""
    if devices is not None:
        others = [one for one in map(torch.device, devices) if one.type != "cpu"]
        if others:
            got = f"got devices= with {others[0]}, which does not exist so far"
            refuse(got, "Pass 'cpu', or use ranks.", kind=NotImplementedError)
        if len(devices) == 0:
            refuse("got no devices, expected one for each row", "Pass at least one.")
        return len(devices)
    if isinstance(schedule, PipelineSchedule):
        return schedule.ranks
    if balance is not None and not isinstance(balance, str):
        return len(balance)
    return max(1, min(torch.get_num_threads(), layers))


def pool_of(rows: int) -> WorkerPool:
    """Returns threads that share the cores out. They end with the pool."""
    threads = _C.intra_op_threads_of(torch.get_num_threads(), rows)
    pool = WorkerPool(devices=[torch.device("cpu")] * rows, intra_op_threads=threads)
    start_threads(pool, rows, "trireme-row")
    return pool
