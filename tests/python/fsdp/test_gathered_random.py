"""Random training programs where units are gathered: from all ranks or from neighbours, out of
their device's memory or another one's. One process comes to the same.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import trireme
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import Shard
from torch.optim import SGD, AdamW
from trireme._fsdp import offload as fsdp_offload

from fsdp.random_programs import CLOSE, Net, Program
from fsdp.ranks import pair
from harness.models import batch
from harness.on_ranks import on_gloo_ranks

WORLD = 4


class GatheringProgram(Program):
    """What ranks do not do together over shared memory they do here; unless units are gathered
    dynamically, the first forward of a kind comes to all of them, in order."""

    dynamic = False
    is_first = True

    def paths(self) -> list[list[int] | None]:
        if self.dynamic:
            return super().paths()
        if self.is_first:
            return [None] * self.ours.world
        return [None if path is None else sorted(path) for path in super().paths()]

    def evaluate(self) -> None:
        path = self.paths()[0] if self.dynamic else None
        with torch.no_grad():
            outputs = [side.model(batch(50), path) for side in (self.ours, self.one)]
        torch.testing.assert_close(*outputs, **CLOSE)

    def fail(self) -> None:
        """In place of that: derivatives of inputs alone."""
        rows = batch(3).double().requires_grad_()
        torch.autograd.grad(self.ours.model(rows).sum(), rows)

    def flag(self) -> None:
        self.ours.model.set_reshard_after_backward(self.random.random() < 0.5)

    def backward_of_two(self) -> None:
        """May be of one, twice, or after a unit was used by hand."""
        kind = self.random.randrange(3)
        if kind == 0:
            return super().backward_of_two()
        units = [
            module for module in self.ours.model.modules() if isinstance(module, trireme.FSDPModule)
        ]
        unit = self.random.choice(units)
        if kind == 1:
            unit.unshard()
        if self.random.random() < 0.7:
            unit.reshard()
        for loss in self.losses(self.random.randint(0, 99), self.paths()):
            loss.backward(retain_graph=True)
            (2 * loss).backward()
        return None


def make_program(seed: int) -> GatheringProgram:
    chance = random.Random(seed)
    checkpointed = [chance.random() < 0.3 for _ in range(chance.randint(1, 5))]
    placements = chance.choice([None, lambda param: Shard(param.ndim - 1) if param.ndim else None])
    offload = chance.choice([OffloadPolicy(), trireme.Offload(0.5, 0.25, pin_memory=False)])
    options: dict[str, Any] = {"shard_placement_fn": placements, "offload_policy": offload}
    units = [index for index in range(len(checkpointed)) if chance.random() < 0.7]

    def shard(model: Any) -> None:
        for index in units:
            among = chance.choice([2, 2, True, False])
            trireme.fully_shard(model.layers[index], reshard_after_forward=among, **options)
        trireme.fully_shard(model, reshard_after_forward=chance.choice([2, 2, None]), **options)

    optimizer_class, lr = chance.choice([(SGD, 0.05), (AdamW, 0.01)])
    ours, one = pair(lambda: Net(checkpointed), optimizer_class, shard, lr=lr)
    program = GatheringProgram(chance, ours, one)
    program.dynamic = seed % 2 == 1
    ours.model.set_dynamic_gather(program.dynamic)
    return program


@on_gloo_ranks(WORLD)
def test_random_programs(rank: int) -> None:
    fsdp_offload.offloads_from = lambda device: True
    for seed in range(6):
        program = make_program(seed)
        for _ in range(4):
            program.step()
            program.is_first = False
