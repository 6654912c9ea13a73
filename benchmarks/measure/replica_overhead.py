"""What DataParallel adds to a call of a module that computes next to nothing.

A Linear(8, 8) is called directly and through DataParallel with 2 replicas, in blocks that take
turns, as is a job of the worker pool that does nothing: the caller wakes one thread, which wakes
the caller. Half of that is what is called a wake-up here, and so has its share of calling Python
from a thread.

Run as a rank (`python -m measure.replica_overhead BLOCKS`) it measures once and replies with the
medians.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from measure.ranks import Launch, RankGroup
from measure.reducer_overhead import medians_of_blocks
from measure.worker import take_over_stdout

REPLICAS = 2
WIDTH, ROWS = 8, 16


@dataclass(frozen=True)
class ReplicaOverhead:
    """us of one call, bare and through DataParallel; a step is a forward and a backward."""

    direct_forward: float
    parallel_forward: float
    direct_step: float
    parallel_step: float
    wake_up: float

    @property
    def added_to_forward(self) -> float:
        return self.parallel_forward - self.direct_forward

    @property
    def added_to_step(self) -> float:
        return self.parallel_step - self.direct_step


def measure_replica_overhead(blocks: int) -> ReplicaOverhead:
    """Measures in a fresh process with one thread per replica and `blocks` blocks of ten calls."""
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        module = "measure.replica_overhead"
        launch = Launch("overhead", module, str(blocks), 1, REPLICAS, Path(scratch))
        with RankGroup(launch) as group:
            (reply,) = group.replies()
    return ReplicaOverhead(**reply)


def _measure(blocks: int) -> ReplicaOverhead:
    import trireme

    torch.manual_seed(0)
    direct = nn.Linear(WIDTH, WIDTH)
    parallel = trireme.DataParallel(nn.Linear(WIDTH, WIDTH), replicas=REPLICAS)
    x = torch.randn(ROWS, WIDTH)
    pool = trireme._C.WorkerPool(devices=[torch.device("cpu")], intra_op_threads=[1])
    thread = threading.Thread(target=pool.worker_loop(0), daemon=True)
    thread.start()
    calls = {
        "direct_forward": partial(direct, x),
        "parallel_forward": partial(parallel, x),
        "direct_step": partial(_step, direct, x),
        "parallel_step": partial(_step, parallel, x),
        "wake_up": partial(pool.run, [0], _nothing, _nothing),
    }
    us = {name: 1e3 * ms for name, ms in medians_of_blocks(calls, blocks).items()}
    pool.stopper()()
    thread.join()
    us["wake_up"] /= 2  # there and back
    return ReplicaOverhead(**us)


def _step(module: nn.Module, x: Tensor) -> None:
    module(x).sum().backward()
    module.zero_grad(set_to_none=True)


def _nothing(*_: object) -> None:
    pass


def main() -> None:
    replies = take_over_stdout()
    torch.set_num_threads(REPLICAS)
    replies.write(json.dumps(asdict(_measure(int(sys.argv[1])))) + "\n")
    sys.stdin.readline()


if __name__ == "__main__":
    main()
