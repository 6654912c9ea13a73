"""Copies of sharded modules: memory of their own, sharded in the same way."""

from __future__ import annotations

import copy

import torch
import trireme
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp.ranks import SGD_OPTIONS, assert_parts, in_training, pair, sharded, train_both
from harness.faults import raises
from harness.models import Tied, batch, mlp
from harness.on_ranks import on_shm_ranks
from harness.training import alone


@on_shm_ranks(2)
def test_a_deep_copy_trains_by_itself(rank: int) -> None:
    """From the values of the original, which it leaves alone."""
    ours, one = pair(mlp)
    train_both(ours, one, 0)
    made = in_training(copy.deepcopy(ours.model))
    other = alone(mlp, SGD, **SGD_OPTIONS)
    other.model.load_state_dict(one.model.state_dict())
    assert isinstance(made.model, FSDPModule) and isinstance(made.model[0], FSDPModule)
    for step in (1, 2):
        train_both(made, other, step)
    assert_parts(ours, one)
    train_both(ours, one, 3)
    assert_parts(made, other)


@on_shm_ranks(3)
def test_copies_keep_ties_flags_and_frozen_parameters(rank: int) -> None:
    ours = sharded(Tied, shard=trireme.fully_shard)
    ours.model.mid.bias.requires_grad_(False)
    ours.model.set_reshard_after_forward(False)
    ours.train(0)
    made = copy.deepcopy(ours.model)
    assert made.head.weight is made.embed.weight
    assert made.embed.weight is not ours.model.embed.weight
    assert not made.mid.bias.requires_grad
    made(batch(0))
    assert not hasattr(made.mid.weight, "to_local")  # unsharded until backward
    assert hasattr(ours.model.mid.weight, "to_local")
    pairs = zip(made.state_dict().values(), ours.model.state_dict().values(), strict=True)
    for mine, theirs in pairs:
        assert torch.equal(mine.to_local(), theirs.to_local())
        assert mine.to_local().data_ptr() != theirs.to_local().data_ptr()


@on_shm_ranks(2)
def test_averaged_weights_follow_the_model(rank: int) -> None:
    """torch's AveragedModel over a sharded model is that over a plain one, shard by shard."""
    ours, one = pair(mlp)
    averaged = [
        AveragedModel(each.model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (ours, one)
    ]
    for step in range(3):
        train_both(ours, one, step)
        with trireme.writing(averaged[0]):
            averaged[0].update_parameters(ours.model)
        averaged[1].update_parameters(one.model)
        x = batch(9)
        torch.testing.assert_close(averaged[0](x), averaged[1](x))


@on_shm_ranks(2)
def test_copies_of_modules_that_were_never_used(rank: int) -> None:
    """On the meta device, and without a forward."""
    with torch.device("meta"):
        blank = mlp()
    trireme.fully_shard(blank)
    copied = copy.deepcopy(blank)
    assert all(param.is_meta for param in copied.parameters())
    copied.to_empty(device="cpu")
    for param in copied.parameters():
        nn.init.constant_(param, 0.5)
    assert copied(batch(0)).shape == (8, 3)


@on_shm_ranks(2)
def test_data_of_a_copy_is_refused_as_that_of_a_model(rank: int) -> None:
    """torch has not put the values where shards are."""
    ours = sharded(mlp, shard=trireme.fully_shard)
    made = copy.deepcopy(ours.model)
    for model in (ours.model, made):
        parameter = model[0].weight
        parameter.data = parameter.detach() * 0.5
        with raises(RuntimeError, "got '0.weight' with another .data"):
            model(batch(0))
        model(batch(0))  # said once
