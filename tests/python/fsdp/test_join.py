"""Join: ranks with fewer inputs keep the others company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from ddp.ranks import message_of, mlp, raises, values
from fsdp.ranks import in_training, shard_layers
from shm.ranks import on_shm_and_gloo_ranks, on_shm_ranks
from zero.test_join import OPTIONS, by_torchs_ddp, inputs, loop


@pytest.mark.parametrize(("counts", "world"), [((1, 4), 2), ((4, 0), 2), ((3, 1, 2), 3)])
@on_shm_and_gloo_ranks("world", timeout=60)
def test_uneven_inputs_train_as_under_torchs_ddp(
    rank: int, counts: tuple[int, ...], world: int
) -> None:
    for by_initial_world in (True, False):
        join = {"divide_by_initial_world_size": by_initial_world}
        right = by_torchs_ddp(rank, counts, **join)
        model = shard_layers(mlp())
        assert isinstance(model, Joinable)
        optimizer = SGD(model.parameters(), **OPTIONS)
        with Join([model], optimizer=optimizer, **join):
            loop(model, optimizer, inputs(rank, counts[rank]), zero_first=True)
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.full_tensor(), right[name])
        training = in_training(model)
        training.train(0)  # after it all is as before


@on_shm_and_gloo_ranks(2)
def test_a_schedule_and_clipping_are_followed(rank: int) -> None:
    def train(net: nn.Module, optimizer: SGD, clip: Any) -> None:
        schedule = ExponentialLR(optimizer, gamma=0.5)
        for x in inputs(rank, 2 + 3 * rank):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            clip(net.parameters(), 0.01)
            optimizer.step()
            schedule.step()

    ddp, model = TorchDDP(mlp()), shard_layers(mlp())
    with ddp.join():
        train(ddp, SGD(ddp.parameters(), **OPTIONS), nn.utils.clip_grad_norm_)
    optimizer = SGD(model.parameters(), **OPTIONS)
    with Join([model], optimizer=optimizer):
        train(model, optimizer, trireme.clip_grad_norm_)
    right = values(ddp)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), right[name])


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


@on_shm_ranks(2, patience_s=20)
def test_throwing_on_early_termination(rank: int) -> None:
    model = shard_layers(mlp())
    optimizer = SGD(model.parameters(), **OPTIONS)
    with (
        pytest.raises(RuntimeError) as caught,
        Join([model], optimizer=optimizer, throw_on_early_termination=True),
    ):
        loop(model, optimizer, inputs(rank, 1 + rank), zero_first=True)
    assert "inputs" in message_of(caught.value)
    dist.barrier()
