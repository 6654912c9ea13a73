"""What a reducer itself costs: many small parameters, bare and wrapped, and no communication.

torch's fake process group answers every collective at once, so that with world 2 both sides do all
their work except communication. Bare and wrapped steps alternate in blocks inside one process.

Run as a rank (`python -m measure.reducer_overhead CONFIG`) it measures once and replies with the
medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from measure.ranks import Launch, RankGroup
from measure.sides import Side
from measure.strategies import STRATEGIES, OptimizerSpec
from measure.worker import take_over_stdout

PARAMETERS = 1000
NUMEL = 64
BLOCK_STEPS = 10
WARM_UP_BLOCKS = 2


@dataclass(frozen=True)
class Overhead:
    """ms per step (forward, backward, zero_grad) of the bare and of the wrapped module."""

    bare_ms: float
    wrapped_ms: float

    @property
    def added_ms(self) -> float:
        return self.wrapped_ms - self.bare_ms


class ManyParameters(nn.Module):
    """1,000 parameters of 64 elements in a graph that costs little besides their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(NUMEL) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.stack(list(self.parts)) * x).sum()


def measure_overhead(side: Side, world: int, blocks: int) -> Overhead:
    """Measures `side` in a fresh process with `blocks` blocks of ten steps each."""
    argument = {"strategy": side.strategy, "options": dict(side.options)}
    text = json.dumps({**argument, "world": world, "blocks": blocks})
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch("overhead", "measure.reducer_overhead", text, 1, 1, Path(scratch))
        with RankGroup(launch) as group:
            (reply,) = group.replies()
    return Overhead(**reply)


def timed_in_blocks(steps: Mapping[str, Callable[[], object]], blocks: int) -> Overhead:
    """Times the steps "bare" and "wrapped"."""
    medians = medians_of_blocks(steps, blocks)
    return Overhead(medians["bare"], medians["wrapped"])


def medians_of_blocks(steps: Mapping[str, Callable[[], object]], blocks: int) -> dict[str, float]:
    """ms of each of the steps, which take turns in blocks; the first two of each are warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for block in range(WARM_UP_BLOCKS + blocks):
        for name, step in steps.items():
            taken = [_taken_ms(step) for _ in range(BLOCK_STEPS)]
            if block >= WARM_UP_BLOCKS:
                times[name] += taken
    return {name: statistics.median(taken) for name, taken in times.items()}


def enter_fake_group(world: int) -> None:
    """This process becomes rank 0 of `world`, of which the others answer at once, and nothing."""
    # Importing the module registers the "fake" backend.
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

    options = FakeProcessGroup.Options()
    options.simulate_uniform_ranks = True  # else its futures are empty, which torch refuses
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world, pg_options=options)


def _taken_ms(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def _measure(config: Mapping[str, Any]) -> Overhead:
    torch.manual_seed(0)
    build = STRATEGIES[config["strategy"]].build
    assert build is not None
    modules = {
        "bare": ManyParameters(),
        "wrapped": build(ManyParameters(), OptimizerSpec(), config["options"]).module,
    }
    x = torch.randn(NUMEL)
    steps = {name: partial(_step, module, x) for name, module in modules.items()}
    return timed_in_blocks(steps, config["blocks"])


def _step(module: nn.Module, x: Tensor) -> None:
    module(x).backward()
    module.zero_grad(set_to_none=True)


def main() -> None:
    replies = take_over_stdout()
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    enter_fake_group(config["world"])
    replies.write(json.dumps(asdict(_measure(config))) + "\n")
    sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
