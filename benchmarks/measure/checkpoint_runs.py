"""One load of a checkpoint by fresh ranks, timed or watched; and what made the checkpoint.

Run as a rank (`python -m measure.checkpoint_runs CONFIG`) it builds a model and obeys commands (one
JSON object per line on standard input):
  {"do": "save"}   trains a step, so that there is a state, and saves
  {"do": "load"}   loads; both reply with their seconds
  {"do": "sum"}    replies with the sum of all parameters and moments
  {"do": "stop"}   leaves the process group and ends
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from models import Mlp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from measure import memory
from measure.peak_memory import watching
from measure.ranks import Launch, RankFailed, RankGroup
from measure.strategies import STRATEGIES, OptimizerSpec, Parallel
from measure.worker import process_group, take_over_stdout

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "trireme",
)


@dataclass(frozen=True)
class Model:
    """An `Mlp`, each layer a unit."""

    width: int
    units: int

    @property
    def unit_mib(self) -> float:
        return 4 * self.width * (self.width + 1) / 2**20

    def build(self) -> nn.Module:
        """In memory that is there, as that of a model with random values is."""
        with torch.device("meta"):
            made = Mlp(self.width, self.units)
        made = made.to_empty(device="cpu")
        with torch.no_grad():
            for index, param in enumerate(made.parameters()):
                param.fill_(1e-3 * (index % 7))
        return made


@dataclass(frozen=True)
class CheckpointRun:
    """`library`: "trireme", or "torch": torch.distributed.checkpoint."""

    library: str
    strategy: str
    world: int
    threads: int
    folder: str
    width: int
    units: int

    @property
    def model(self) -> Model:
        return Model(self.width, self.units)


@dataclass(frozen=True)
class Saved:
    """`sum`: of all parameters and moments."""

    seconds: float
    sum: float


@dataclass(frozen=True)
class Loaded:
    """`seconds` of the slowest rank; `reading_s` of them inside torch's `load`, which leaves values
    that then go into model and optimizer; of ours all. `held_mib`: optimizer's state that loading
    has made, of all ranks."""

    seconds: float
    reading_s: float
    held_mib: float


def save_with(run: CheckpointRun) -> Saved:
    """Trains one step before."""
    with _ranks(run) as group:
        replies = group.ask({"do": "save"})
        sums = group.ask({"do": "sum"})
    return Saved(max(reply["seconds"] for reply in replies), sums[0]["sum"])


def load_with(run: CheckpointRun, expected: Saved) -> Loaded:
    """Loads in processes that have a model, and an optimizer without state. Raises RankFailed if
    what they have then is not what was saved."""
    with _ranks(run) as group:
        loaded = _load_in(group)
        _check(group, expected)
    return loaded


def load_peak_mib(run: CheckpointRun, expected: Saved) -> float:
    """MiB that the ranks take while loading beyond what they had before and what they hold then.

    At the fullest moment that is seen, every 20 ms and at the end; of written pages, what ranks
    share counted once, the page cache not at all. As `load_with` otherwise.
    """
    with _ranks(run) as group:
        before = sum(map(memory.written_mib, group.processes))
        with watching(group.processes) as watch:
            loaded = _load_in(group)
        peak = max(watch.peak_mib, sum(map(memory.written_mib, group.processes)))
        _check(group, expected)
    return peak - before - loaded.held_mib


def _load_in(group: RankGroup) -> Loaded:
    replies = group.ask({"do": "load"})
    return Loaded(
        max(reply["seconds"] for reply in replies),
        max(reply["reading_s"] for reply in replies),
        sum(reply["held_mib"] for reply in replies),
    )


def _check(group: RankGroup, expected: Saved) -> None:
    check_sums([reply["sum"] for reply in group.ask({"do": "sum"})], expected)


def check_sums(sums: Sequence[float], expected: Saved) -> None:
    """Raises RankFailed if a rank has other values than were saved."""
    for rank, got in enumerate(sums):
        if not math.isclose(got, expected.sum, rel_tol=1e-9):
            raise RankFailed(
                f"[checkpoint] got values of sum {got}, expected {expected.sum} (rank {rank} of "
                f"{len(sums)}). Look for what loads something else than was saved."
            )


@contextmanager
def _ranks(run: CheckpointRun) -> Iterator[RankGroup]:
    with tempfile.TemporaryDirectory(prefix="bench") as logs:
        config = json.dumps(asdict(run))
        name = "measure.checkpoint_runs"
        launch = Launch("checkpoint", name, config, run.world, run.threads, Path(logs))
        with RankGroup(launch) as group:
            group.replies()
            yield group


class Library(Protocol):
    """How model and optimizer are saved and loaded. `load` returns the seconds spent reading."""

    def save(self, folder: str, parallel: Parallel) -> None: ...
    def load(self, folder: str, parallel: Parallel) -> float: ...


class Trireme:
    def save(self, folder: str, parallel: Parallel) -> None:
        import trireme

        trireme.save_checkpoint(folder, parallel.module, parallel.optimizer)

    def load(self, folder: str, parallel: Parallel) -> float:
        import trireme

        start = time.perf_counter()
        trireme.load_checkpoint(folder, parallel.module, parallel.optimizer)
        return time.perf_counter() - start


class Torch:
    """Does what torch's documentation says: get_state_dict, which makes the optimizer's state,
    load, set_state_dict."""

    def save(self, folder: str, parallel: Parallel) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(parallel.module, parallel.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str, parallel: Parallel) -> float:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(parallel.module, parallel.optimizer)
        state = {"model": model, "optimizer": optimizer}
        start = time.perf_counter()
        checkpoint.load(state, checkpoint_id=folder)
        seconds = time.perf_counter() - start
        set_state_dict(
            parallel.module,
            parallel.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return seconds


LIBRARIES: dict[str, Library] = {"trireme": Trireme(), "torch": Torch()}


def train_a_step(parallel: Parallel, width: int) -> None:
    torch.manual_seed(0)
    parallel.module(torch.randn(2, width)).square().mean().backward()
    parallel.optimizer.step()
    parallel.optimizer.zero_grad()


def _save(run: CheckpointRun, parallel: Parallel) -> dict[str, float]:
    train_a_step(parallel, run.width)
    start = time.perf_counter()
    LIBRARIES[run.library].save(run.folder, parallel)
    return {"seconds": time.perf_counter() - start}


def _load(run: CheckpointRun, parallel: Parallel) -> dict[str, float]:
    if run.world > 1:
        dist.barrier()
    start = time.perf_counter()
    reading_s = LIBRARIES[run.library].load(run.folder, parallel)
    seconds = time.perf_counter() - start
    held = sum(
        memory.local_of(tensor).nbytes for tensor in memory.optimizer_state(parallel.optimizer)
    )
    return {"seconds": seconds, "reading_s": reading_s, "held_mib": held / 2**20}


def _sum(run: CheckpointRun, parallel: Parallel) -> dict[str, float]:
    return {"sum": sum_of(parallel)}


ANSWERS: dict[str, Callable[[CheckpointRun, Parallel], dict[str, Any]]] = {
    "save": _save,
    "load": _load,
    "sum": _sum,
}


def sum_of(parallel: Parallel) -> float:
    """Is the same on all ranks, under every strategy."""
    params = list(parallel.module.parameters())
    moments = [tensor for tensor in memory.optimizer_state(parallel.optimizer) if tensor.dim() > 0]
    is_sharded = any(map(memory.is_sharded, params))
    has_shards = is_sharded or isinstance(parallel.optimizer, ZeroRedundancyOptimizer)
    total = 0.0
    for tensors, has_part in ((params, is_sharded), (moments, has_shards)):
        with torch.no_grad():
            parts = [memory.local_of(tensor).sum(dtype=torch.float64) for tensor in tensors]
        of_these = torch.stack([*parts, torch.zeros((), dtype=torch.float64)]).sum()
        if has_part:
            dist.all_reduce(of_these)
        total += float(of_these)
    return total


def main() -> None:
    replies = take_over_stdout()
    run = CheckpointRun(**json.loads(sys.argv[1]))
    strategy = STRATEGIES[run.strategy]
    with process_group(strategy):
        torch.set_num_threads(run.threads)
        for name in IMPORTED:
            importlib.import_module(name)  # else some sides import it while they load
        memory.keep_heap_warm()
        assert strategy.build is not None
        parallel = strategy.build(run.model.build(), OptimizerSpec(), {})
        memory.give_back_unused()
        print(json.dumps({"ready": True}), file=replies)
        for line in sys.stdin:
            command = json.loads(line)["do"]
            if command == "stop":
                break
            print(json.dumps(ANSWERS[command](run, parallel)), file=replies)


if __name__ == "__main__":
    main()
