"""What a save costs a rank that trains: one side, timed save by save.

Run as a rank (`python -m measure.save_runs CONFIG`) it builds a workload under a strategy and obeys
commands (one JSON object per line on standard input):
  {"do": "save"}  saves at once, then beside nothing and beside steps; replies with SaveCost
  {"do": "load"}  loads with checksums and without; replies with {"seconds": [with, without],
                  "read_bytes": [with, without]}
  {"do": "train"} steps as "save" does, without a save
  {"do": "stop"}  leaves the process group and ends
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from workloads import WorkloadOptions

from measure import memory
from measure.peak_memory import watching
from measure.ranks import Launch, RankGroup
from measure.strategies import STRATEGIES, Parallel
from measure.worker import RankConfig, Trainer, process_group, take_over_stdout

RANKS = 2


@dataclass(frozen=True)
class SaveRun:
    """`library`: "trireme", or "torch": torch.distributed.checkpoint. `steps`: beside a save, so
    many that they take longer than it."""

    library: str
    strategy: str
    workload: str
    rows: int
    steps: int
    folder: str
    tiny: bool = False
    ranks: int = RANKS

    @property
    def label(self) -> str:
        return f"{STRATEGIES[self.strategy].title}, {self.workload}"


@dataclass(frozen=True)
class SaveCost:
    """Of one save of each kind. `now_s`: a synchronous one. `call_ms`: the call of an asynchronous
    one; `stall_ms`: what threads of the rank were held by it in all (of torch's: the call);
    `lost_s`: by how much steps took longer for it; `durable_s`: until it is on the disk, with
    nothing beside; `beside_s`: with steps beside. `copy_ms`: of one copy of what this rank writes.
    """

    now_s: float
    call_ms: float
    stall_ms: float
    lost_s: float
    durable_s: float
    beside_s: float
    copy_ms: float


@contextmanager
def saving_ranks(run: SaveRun, logs: Path) -> Iterator[RankGroup]:
    """Ranks that have a state and have saved once, which makes what the first save makes."""
    argument = json.dumps(asdict(run))
    launch = Launch(f"saves-{run.strategy}", "measure.save_runs", argument, run.ranks, 1, logs)
    with RankGroup(launch) as group:
        group.replies()
        cost_of_save(group)
        yield group


def cost_of_save(group: RankGroup) -> SaveCost:
    """Of each number that of the slowest rank."""
    replies = group.ask({"do": "save"})
    return SaveCost(**{name: max(reply[name] for reply in replies) for name in replies[0]})


def load_seconds(group: RankGroup) -> list[float]:
    """Seconds of a load from the page cache with checksums and without, of the slowest rank."""
    replies = group.ask({"do": "load"})
    return [max(times) for times in zip(*(reply["seconds"] for reply in replies), strict=True)]


def hashed_share(group: RankGroup, folder: Path) -> float:
    """Bytes that all ranks read more in a load with checksums than without, of the bytes of the
    files of tensors: 1 if each byte is hashed once on the host."""
    replies = group.ask({"do": "load"})
    with_bytes, without = map(sum, zip(*(reply["read_bytes"] for reply in replies), strict=True))
    return (with_bytes - without) / sum(it.stat().st_size for it in folder.glob("*.safetensors"))


def peaks_mib(group: RankGroup) -> list[float]:
    """The fullest moments of all ranks together while they save beside steps, and while they only
    train."""
    peaks = []
    for what in ("save", "train"):
        with watching(group.processes) as watch:
            group.ask({"do": what})
        peaks.append(watch.peak_mib)
    return peaks


class Library(Protocol):
    """How model and optimizer are saved. `save_beside` returns what waits for the save, and returns
    the ms that it has held this rank for, if the library tells."""

    def save(self, folder: str, parallel: Parallel) -> None: ...
    def save_beside(self, folder: str, parallel: Parallel) -> Callable[[], float | None]: ...


class Trireme:
    def save(self, folder: str, parallel: Parallel) -> None:
        import trireme

        trireme.save_checkpoint(folder, parallel.module, parallel.optimizer)

    def save_beside(self, folder: str, parallel: Parallel) -> Callable[[], float | None]:
        import trireme

        pending = trireme.save_checkpoint(
            folder, parallel.module, parallel.optimizer, asynchronous=True
        )

        def wait() -> float:
            pending.wait()
            return pending.stall_ms

        return wait


class Torch:
    """Does what torch's documentation says: the state by get_state_dict, and a group of its own
    for the thread that saves."""

    def __init__(self) -> None:
        self._group: Any = None

    def save(self, folder: str, parallel: Parallel) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(_torch_state(parallel), checkpoint_id=folder)

    def save_beside(self, folder: str, parallel: Parallel) -> Callable[[], float | None]:
        from torch.distributed import checkpoint

        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        future: Any = checkpoint.async_save(
            _torch_state(parallel), checkpoint_id=folder, process_group=self._group
        )

        def wait() -> None:
            future.result()

        return wait


def _torch_state(parallel: Parallel) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(parallel.module, parallel.optimizer)
    return {"model": model, "optimizer": optimizer}


LIBRARIES: dict[str, Callable[[], Library]] = {"trireme": Trireme, "torch": Torch}


class Saver:
    """A rank that trains, and saves."""

    def __init__(self, run: SaveRun) -> None:
        self._run = run
        self._trainer = Trainer(
            RankConfig(
                *(run.strategy, run.workload, run.ranks * run.rows, 1),
                workload_options=WorkloadOptions(tiny=run.tiny),
            ),
            STRATEGIES[run.strategy],
        )
        self._library = LIBRARIES[run.library]()
        self._train(2)  # there is a state, then
        self._copy_ms = _part_copy_ms(self._trainer.parallel, run.ranks)
        memory.give_back_unused()

    def save(self) -> dict[str, Any]:
        parallel, folder = self._trainer.parallel, self._run.folder
        now_s = _seconds(lambda: self._library.save(f"{folder}/now", parallel))
        durable_s = _seconds(lambda: self._library.save_beside(f"{folder}/alone", parallel)())
        plain_s = _seconds(lambda: self._train(self._run.steps))
        _meet()
        start = time.perf_counter()
        wait = self._library.save_beside(f"{folder}/beside", parallel)
        call_s = time.perf_counter() - start
        with ThreadPoolExecutor(1) as waiting:  # whose end is seen while steps run
            ended = waiting.submit(_when_done, wait)
            self._train(self._run.steps)
            lost_s = time.perf_counter() - start - plain_s
            stall_ms, end = ended.result()
        stall_ms = call_s * 1e3 if stall_ms is None else stall_ms
        times = (now_s, call_s * 1e3, stall_ms, lost_s, durable_s, end - start, self._copy_ms)
        return asdict(SaveCost(*times))

    def load(self) -> dict[str, Any]:
        costs = [self._load(verify) for verify in (True, False)]
        return {name: [cost[name] for cost in costs] for name in costs[0]}

    def _load(self, verify: bool) -> dict[str, float]:
        import trireme

        parallel, folder = self._trainer.parallel, f"{self._run.folder}/now"
        before = _bytes_read()
        seconds = _seconds(
            lambda: trireme.load_checkpoint(
                folder, parallel.module, parallel.optimizer, verify=verify
            )
        )
        return {"seconds": seconds, "read_bytes": _bytes_read() - before}

    def train(self) -> dict[str, Any]:
        self._train(self._run.steps)
        return {}

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._trainer.step()


def _seconds(body: Callable[[], object]) -> float:
    """Begins on all ranks together, with nothing on its way to the disk."""
    _meet()
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def _bytes_read() -> int:
    """What this process has read by system calls, from the page cache, too."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def _when_done(wait: Callable[[], float | None]) -> tuple[float | None, float]:
    return wait(), time.perf_counter()


def _meet() -> None:
    os.sync()
    dist.barrier()


def _part_copy_ms(parallel: Parallel, ranks: int) -> float:
    """Milliseconds of one copy of what this rank writes, into memory that is there."""
    states = memory.optimizer_state(parallel.optimizer)
    tensors = [memory.local_of(it) for it in (*parallel.module.parameters(), *states)]
    has_all = not any(map(memory.is_sharded, parallel.module.parameters()))
    numel = sum(it.nbytes for it in tensors) // (ranks if has_all else 1)
    source, target = torch.ones(numel, dtype=torch.uint8), torch.zeros(numel, dtype=torch.uint8)
    start = time.perf_counter()
    target.copy_(source)
    return (time.perf_counter() - start) * 1e3


def serve(saver: Saver, replies: Any) -> None:
    """Obeys commands until told to stop, or until whoever gave them is gone."""
    answers = {"save": saver.save, "load": saver.load, "train": saver.train}
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        command = json.loads(line)["do"]
        if command == "stop":
            return
        print(json.dumps(answers[command]()), file=replies)


def medians(costs: Sequence[SaveCost]) -> dict[str, float]:
    return {
        name: float(torch.tensor([getattr(cost, name) for cost in costs]).median())
        for name in SaveCost.__dataclass_fields__
    }


def main() -> None:
    replies = take_over_stdout()
    run = SaveRun(**json.loads(sys.argv[1]))
    with process_group(STRATEGIES[run.strategy]):
        torch.set_num_threads(1)
        serve(Saver(run), replies)


if __name__ == "__main__":
    main()
