"""The threads of a pipeline in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

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


def refuse_wrapped(layers: Iterable[nn.Module]) -> None:
    """Refuses strategies around layers, whose threads would all call their collectives."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, DistributedDataParallel | FSDPModule):
                got = (
                    f"got a layer in {type(module).__name__} in a pipeline in one process: several "
                    "threads would call their collectives"
                )
                refuse(got, "Wrap the pipeline, or use ranks.", kind=NotImplementedError)


def pool_of(rows: int) -> WorkerPool:
    """Returns threads that share the cores out. They end with the pool."""
    threads = _C.intra_op_threads_of(torch.get_num_threads(), rows)
    pool = _C.row_pool(threads)
    start_threads(pool, rows, "trireme-row")
    return pool
