"""Horovod's API beside what it stands on, in the same ranks, which alternate between the two.

Run as a rank (`python -m measure.horovod_rounds CASE`) it measures once and replies.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from workloads import WORKLOADS, WorkloadOptions

from measure.ranks import Launch, RankGroup
from measure.reducer_overhead import NUMEL, ManyParameters
from measure.worker import take_over_stdout

NAMES, NAMED_BYTES = 200, 1024
_BYTES_PER_BLOCK = 64 << 20
_MOST_CALLS = 200

Times = Mapping[str, list[float]]
Call = Callable[[], object]


@dataclass(frozen=True)
class HorovodCase:
    """What is timed, over `rounds`.

    `kind`: "steps" (of `what`, a workload), "many" (parameters), "allreduce" (of `what` bytes) or
    "names" (in the same order, and in opposite ones).
    """

    kind: str
    what: str
    rounds: int
    calls: int
    world: int = 2
    tiny: bool = False


def measure_horovod(case: HorovodCase) -> Times:
    """Microseconds per call of the slowest rank, an entry per round, of each side."""
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        text = json.dumps(asdict(case))
        launch = Launch("horovod", "measure.horovod_rounds", text, case.world, 1, Path(scratch))
        with RankGroup(launch) as group:
            replies = group.replies()
    return {
        name: [max(times) for times in zip(*(reply[name] for reply in replies), strict=True)]
        for name in replies[0]
    }


def _calls_of(case: HorovodCase) -> dict[str, Call]:
    if case.kind == "steps":
        return _steps(case)
    if case.kind == "many":
        return _many_parameters()
    return _all_reduces(int(case.what)) if case.kind == "allreduce" else _named()


def _steps(case: HorovodCase) -> dict[str, Call]:
    import trireme
    import trireme.horovod as hvd

    workload = WORKLOADS[case.what](WorkloadOptions(tiny=case.tiny))
    first = dist.get_rank() * workload.rows_per_rank
    rows = torch.arange(first, first + workload.rows_per_rank)
    samples = workload.samples()
    batch = samples.rows(rows % len(samples))

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        workload.loss(module(batch.inputs), batch).backward()
        optimizer.step()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = workload.model()
        return module, torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    under_ddp, plain = made()
    module, optimizer = made()
    distributed = hvd.DistributedOptimizer(optimizer, module.named_parameters())
    return {
        "ddp": partial(step, trireme.DistributedDataParallel(under_ddp), plain),
        "horovod": partial(step, module, distributed),
    }


def _many_parameters() -> dict[str, Call]:
    """Backwards that reduce, and end with gradients dropped."""
    import trireme
    import trireme.horovod as hvd

    x = torch.randn(NUMEL)
    bare, many = ManyParameters(), ManyParameters()
    ddp = trireme.DistributedDataParallel(ManyParameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(many.parameters(), lr=0.1))

    def reduced_by_ddp(module: nn.Module) -> None:
        module(x).backward()
        module.zero_grad(set_to_none=True)

    def reduced_by_horovod() -> None:
        many(x).backward()
        optimizer.synchronize()
        optimizer.zero_grad()

    return {
        "bare": partial(reduced_by_ddp, bare),
        "ddp": partial(reduced_by_ddp, ddp),
        "horovod": reduced_by_horovod,
    }


def _all_reduces(size: int) -> dict[str, Call]:
    import trireme.horovod as hvd

    tensor = torch.zeros(size // 4)
    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "horovod": lambda: hvd.allreduce_(tensor, name="tensor", op=hvd.Sum),
    }


def _named() -> dict[str, Call]:
    import trireme.horovod as hvd

    tensors = [torch.zeros(NAMED_BYTES // 4) for _ in range(NAMES)]

    def reduce(backwards: bool) -> None:
        numbers = range(NAMES - 1, -1, -1) if backwards else range(NAMES)
        handles = [
            hvd.allreduce_async_(tensors[number], name=f"tensor {number}", op=hvd.Sum)
            for number in numbers
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return {
        "same": partial(reduce, False),
        "opposite": partial(reduce, dist.get_rank() % 2 == 1),
    }


def _time_us(call: Call, calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def _measure(case: HorovodCase) -> Times:
    sides = list(_calls_of(case).items())
    calls = case.calls
    if case.kind == "allreduce":
        calls = max(3, min(_MOST_CALLS, _BYTES_PER_BLOCK // int(case.what)))
    found: dict[str, list[float]] = {name: [] for name, _ in sides}
    for _, call in sides:
        _time_us(call, max(3, calls // 4))
    for number in range(case.rounds):
        for name, call in sides if number % 2 == 0 else reversed(sides):
            found[name].append(_time_us(call, calls))
    return found


def main() -> None:
    """Measures what the first argument says and sends the times to the launcher."""
    replies = take_over_stdout()
    import trireme.horovod as hvd

    torch.set_num_threads(1)
    hvd.init()
    times = _measure(HorovodCase(**json.loads(sys.argv[1])))
    print(json.dumps(times), file=replies)
    sys.stdin.readline()
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
