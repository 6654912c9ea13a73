"""What Join asks of the user of fully_shard; contract/test_join.py has what it does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD

from fsdp.ranks import shard_layers
from harness.faults import raises
from harness.joins import OPTIONS, inputs
from harness.models import mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks


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


@on_shm_and_gloo_ranks(2)
def test_synchronized_layers_are_refused(rank: int) -> None:
    """Also on a rank that has no inputs at all."""
    for counts in ((2, 2), (0, 2)):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model = trireme.fully_shard(trireme.convert_sync_batchnorm(model))
        optimizer = SGD(model.parameters(), **OPTIONS)
        with (
            raises(ValueError, "[fully_shard] got SyncBatchNorm at '1' under join()"),
            Join([model], optimizer=optimizer),
        ):
            for _ in range(counts[rank]):
                model(torch.ones(4, 8)).sum().backward()
