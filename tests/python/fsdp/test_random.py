"""Random training programs: whatever ranks do in whichever order, one process comes to the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trireme
from torch.distributed.tensor import Shard
from torch.optim import SGD, AdamW

from fsdp.random_programs import Net, Program
from fsdp.ranks import evaluate, pair
from harness.on_ranks import on_shm_ranks


def make_program(seed: int) -> Program:
    chance = random.Random(seed)
    checkpointed = [chance.random() < 0.3 for _ in range(chance.randint(1, 5))]
    placements = chance.choice([None, lambda param: Shard(param.ndim - 1) if param.ndim else None])
    options = {"shard_placement_fn": placements}
    units = [index for index in range(len(checkpointed)) if chance.random() < 0.7]

    def shard(model: Any) -> None:
        for index in units:
            trireme.fully_shard(model.layers[index], **options)
        trireme.fully_shard(model, **options)

    optimizer_class, lr = chance.choice([(SGD, 0.05), (AdamW, 0.01)])
    ours, one = pair(lambda: Net(checkpointed), optimizer_class, shard, lr=lr)
    return Program(chance, ours, one)


@pytest.mark.parametrize("world", [1, 2, 3])
@on_shm_ranks("world")
def test_random_programs(rank: int, world: int) -> None:
    for seed in range(8):
        program = make_program(100 * world + seed)
        for _ in range(6):
            program.step()
        evaluate(program.ours, 51)  # else who still evaluates waits for what others say there
