"""What sharding itself costs: many small units, bare and sharded.

Each step is a forward and a backward of 64 units of 4 parameters, a step of SGD over one of these
parameters, and zero_grad. The optimizer steps no more than that, because DTensors make it slow for
everybody; but what sharding does before an optimizer steps is done. Bare and sharded steps
alternate in blocks inside each process.

The ranks have the group of their strategy, or torch's fake one, in which nothing is ever moved.
Run as a rank (`python -m measure.engine_cost CONFIG`) it measures once and replies with the
medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from measure.ranks import Launch, RankGroup
from measure.reducer_overhead import Overhead, enter_fake_group, timed_in_blocks
from measure.sides import Side
from measure.strategies import STRATEGIES, Group, OptimizerSpec
from measure.worker import take_over_stdout

UNITS = 64
WIDTH = 16
RANKS = 2


class ManyUnits(nn.Module):
    """64 blocks of 4 parameters: two layers of 16 to 16, with their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(UNITS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


def measure_engine_cost(side: Side, blocks: int, *, fake: bool = False) -> Overhead:
    """Mean over 2 fresh ranks with a thread each, or over the one that a `fake` group has."""
    argument = {"strategy": side.strategy, "options": dict(side.options)}
    text = json.dumps({**argument, "blocks": blocks, "fake": fake})
    world = 1 if fake else RANKS
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch("engine", "measure.engine_cost", text, world, 1, Path(scratch))
        with RankGroup(launch) as group:
            ranks = [Overhead(**reply) for reply in group.replies()]
    return Overhead(
        statistics.fmean(rank.bare_ms for rank in ranks),
        statistics.fmean(rank.wrapped_ms for rank in ranks),
    )


def _measure(config: Mapping[str, Any]) -> Overhead:
    torch.manual_seed(0)
    build = STRATEGIES[config["strategy"]].build
    assert build is not None
    modules = {
        "bare": ManyUnits(),
        "wrapped": build(ManyUnits(), OptimizerSpec(), config["options"]).module,
    }
    x = torch.randn(1, WIDTH)
    steps = {name: partial(_step, module, _sgd(module), x) for name, module in modules.items()}
    return timed_in_blocks(steps, config["blocks"])


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([next(module.parameters())], lr=1e-6)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    module(x).backward()
    optimizer.step()
    module.zero_grad(set_to_none=True)


def main() -> None:
    replies = take_over_stdout()
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    group = STRATEGIES[config["strategy"]].group
    if config["fake"]:
        group = Group(partial(enter_fake_group, RANKS), dist.destroy_process_group)
    assert group is not None
    group.enter()
    replies.write(json.dumps(asdict(_measure(config))) + "\n")
    sys.stdin.readline()
    group.leave()


if __name__ == "__main__":
    main()
