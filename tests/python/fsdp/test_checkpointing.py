"""Activation checkpointing: units whose forwards run once more in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp.models import Checkpointed, shard_list
from fsdp.ranks import pair, rows_of, step_both, train_both
from harness.models import mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks


def again(module: nn.Module, x: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
    """Computes it twice, by torch's function or, for None, by ours."""
    if reentrant is None:
        return trireme.checkpoint(module, x)
    return checkpoint(module, x, use_reentrant=reentrant)


class CheckpointedInside(Checkpointed):
    """With a unit, besides, that computes its own layer again."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(reentrant)
        self.layers[1] = Recomputing(self.layers[1], reentrant)


class Recomputing(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return again(self.layer, x, self.reentrant)


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_checkpointing(rank: int, world: int) -> None:
    for reentrant in (False, True, None):
        for kind in (Checkpointed, CheckpointedInside):

            def make(reentrant: bool | None = reentrant, kind: Any = kind) -> nn.Module:
                return kind(reentrant)

            for shard in (shard_list, trireme.fully_shard):
                ours, one = pair(make, shard=shard)
                for step in range(4):
                    numbers = (step, step + 1) if step == 2 else (step,)
                    train_both(ours, one, *numbers)


@on_shm_ranks(2)
def test_checkpointing_the_root(rank: int) -> None:
    """The whole model is computed again in its backward; then also two of its forwards."""
    for reentrant in (False, True, None):
        ours, one = pair(mlp)
        for step in range(4):
            for training in (ours, one):
                training.optimizer.zero_grad()
                outputs = [
                    again(training.model, rows_of(number, training).requires_grad_(), reentrant)
                    for number in range(step, step + 1 + step % 2)
                ]
                torch.stack(outputs).square().mean().backward()
            step_both(ours, one)


@pytest.mark.parametrize("reshard", [True, False])
@on_shm_and_gloo_ranks(2)
def test_checkpointing_where_units_are_freed_or_kept(rank: int, reshard: bool) -> None:
    """Units lie in checkpoints, and checkpoints in units; some of them do both."""
    for kind in (Checkpointed, CheckpointedInside):
        options = {"reshard_after_forward": reshard}
        ours, one = pair(lambda kind=kind: kind(None), shard=shard_list, options=options)
        for step in range(4):
            train_both(ours, one, *range(step, step + 1 + step % 2))
