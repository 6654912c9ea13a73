"""What Join asks of the user of fully_shard; contract/test_join.py has what it does."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD

from fsdp.ranks import shard_layers
from harness.faults import raises
from harness.joins import OPTIONS, inputs
from harness.models import mlp
from harness.on_ranks import on_shm_ranks


@on_shm_ranks(2, patience_s=5)
def test_torchs_clipping_is_not_followed_and_named(rank: int) -> None:
    """Nobody tells a rank that has joined that the others clip."""
    model = shard_layers(mlp())
    optimizer = SGD(model.parameters(), **OPTIONS)
    with (
        pytest.raises(dist.DistBackendError, match=r"all_reduce of . float(32|64) by SUM"),
        Join([model], optimizer=optimizer),
    ):
        for x in inputs(rank, 1 + rank):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()


@on_shm_ranks(2)
def test_join_needs_the_optimizer(rank: int) -> None:
    model = trireme.fully_shard(mlp())
    with raises(ValueError, "[fully_shard] got Join without the optimizer"), Join([model]):
        pass
