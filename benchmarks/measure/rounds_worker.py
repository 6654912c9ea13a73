"""One rank of bench_rounds.py, started by torchrun on each host (examples/two_hosts.sh) or on one.

Trains a workload by one of SIDES, and writes how long a step takes, whole rounds counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, AdamW, Optimizer
from trireme.compression import TopK
from workloads import WORKLOADS, SampleOrder, WorkloadOptions

from measure import memory

SENT = Path("/sys/class/net/trireme0/statistics/tx_bytes")
SEED = 0


def held_mib() -> float:
    memory.give_back_unused()
    return memory.without_files_mib(memory.resident_mib())


class Side:
    """How workers exchange: what is called, inside of which block, and what follows a step."""

    def __init__(self, net: nn.Module, block: Any = None, after: Any = None) -> None:
        self.net = net
        self.block: AbstractContextManager[Any] = block or nullcontext()
        self.after: Callable[[], None] = after or (lambda: None)


def torch_averager(model: nn.Module, _: Optimizer, period: int) -> Side:
    averager = PeriodicModelAverager(period=period)
    return Side(model, after=lambda: averager.average_parameters(model.parameters()))


def local_sgd(model: nn.Module, optimizer: Optimizer, period: int) -> Side:
    across = dist.group.WORLD
    return Side(model, trireme.LocalSGD(model, optimizer, sync_every=period, across=across))


def diloco(
    model: nn.Module, optimizer: Optimizer, period: int, outer: Any = None, **options: Any
) -> Side:
    given = {"sync_every": period, "across": dist.group.WORLD, **options}
    return Side(model, trireme.DiLoCo(model, optimizer, outer, **given))


def in_fragments(model: nn.Module, optimizer: Optimizer, period: int) -> Side:
    delay = period // 5 - 1 if period < 50 else 5
    return diloco(model, optimizer, period, fragments=5, fragment_sync_delay=delay)


def sparse(model: nn.Module, optimizer: Optimizer, period: int) -> Side:
    codes = TopK(1 / 64, chunk=4096, decay=0.95)
    outer = SGD(model.parameters(), lr=1.0)
    return diloco(model, optimizer, period, outer, compression=codes)


SIDES: dict[str, Callable[[nn.Module, Optimizer, int], Side]] = {
    "no exchange": lambda model, optimizer, period: Side(model),
    "torch DDP": lambda model, optimizer, period: Side(TorchDDP(model)),
    "torch averager": torch_averager,
    "LocalSGD": local_sgd,
    "DiLoCo at once": diloco,
    "DiLoCo in fragments": in_fragments,
    "SparseLoCo": sparse,
}


def main() -> None:
    side, period, steps, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    memory.keep_heap_warm()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    workload = WORKLOADS["gpt-small-batch"](WorkloadOptions(tiny="TINY" in os.environ))
    samples = workload.samples()
    order = SampleOrder(len(samples), world * workload.rows_per_rank, SEED)
    torch.manual_seed(SEED)
    model = workload.model()
    optimizer = AdamW(model.parameters(), lr=3e-4)
    batch = samples.rows(order.indices(0)[rank::world])
    workload.loss(model(batch.inputs), batch).backward()
    optimizer.step()  # there is its state, then
    before_mib = held_mib()
    made = SIDES[side](model, optimizer, period)

    def step(number: int) -> None:
        batch = samples.rows(order.indices(number)[rank::world])
        optimizer.zero_grad()
        workload.loss(made.net(batch.inputs), batch).backward()
        optimizer.step()
        made.after()

    with made.block:
        for number in range(2):
            step(number)
        dist.barrier()
        sent = int(SENT.read_text()) if SENT.exists() else 0
        began = time.perf_counter()
        for number in range(2, 2 + steps):
            step(number)
        step_ms = 1e3 * (time.perf_counter() - began) / steps
        sent = int(SENT.read_text()) - sent if SENT.exists() else 0
        dist.barrier()
        held = held_mib() - before_mib
    model_mib = sum(param.nbytes for param in model.parameters()) / 2**20
    found = {"step_ms": step_ms, "sent": sent / steps, "held_models": held / model_mib}
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
