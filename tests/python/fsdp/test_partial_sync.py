"""Gradient sync that is turned off for some of the units; unshard() before any forward."""

from __future__ import annotations

import torch
import trireme
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import SGD

from fsdp.ranks import Sharded, assert_parts, gloo_mesh, in_training, local, pair, shard_layers
from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_shm_ranks

HELD, SYNCED = "2.weight", ("0.weight", "0.bias", "4.weight", "4.bias")


@on_shm_ranks(2)
def test_as_torch(rank: int) -> None:
    """One layer accumulates over three backwards while the others average each."""
    ours = in_training(shard_layers(mlp()), SGD, lr=0.1)
    theirs = in_training(shard_layers(mlp(), torch_fully_shard, mesh=gloo_mesh()), SGD, lr=0.1)
    for step in range(4):
        for training in (ours, theirs):
            training.optimizer.zero_grad()
            for number, syncs in enumerate((False, False, True)):
                training.model[2].set_requires_gradient_sync(syncs)
                training.loss(10 * step + number).backward()
                held = dict(training.model.named_parameters())[HELD]
                assert (held.grad is not None) == syncs
        for (name, one), other in zip(
            ours.model.named_parameters(), theirs.model.parameters(), strict=True
        ):
            torch.testing.assert_close(local(one.grad), local(other.grad), msg=name)
        ours.optimizer.step()
        theirs.optimizer.step()


@on_shm_ranks(3)
def test_the_root_alone(rank: int) -> None:
    """Without recurse the flag is that of one unit; a held gradient is never lost."""
    ours, one = pair(mlp, shard=lambda model: shard_inner(model))
    model = ours.model
    for step in range(3):
        for training in (ours, one):
            training.optimizer.zero_grad()
        model.set_requires_gradient_sync(False, recurse=False)
        ours.loss(step).backward()
        assert model[0].weight.grad is None and model[2].weight.grad is not None
        model.set_requires_gradient_sync(True, recurse=False)
        ours.loss(step + 50).backward()
        one.backward(step, step + 50)
        assert_parts(ours, one, grads=True)
        for training in (ours, one):
            training.optimizer.step()
        assert_parts(ours, one)


def shard_inner(model: torch.nn.Module) -> torch.nn.Module:
    trireme.fully_shard(model[2])
    return trireme.fully_shard(model)


@on_shm_ranks(2)
def test_unshard_before_any_forward(rank: int) -> None:
    """An inner unit is unsharded: the outer one is still the root."""
    model = shard_layers(mlp())
    if rank == 1:
        with torch.no_grad():
            model[0].weight.fill_(rank + 1)
    model[0].unshard()
    assert model[0].weight.shape == (13, 6) and model[0].weight[-1, 0] == 2
    handle = model[2].unshard(async_op=True)
    handle.wait()
    assert not isinstance(model[2].weight, type(model[4].weight))
    model.reshard()
    Sharded(model, model, SGD(model.parameters(), lr=0.1), rank, 2).train(0)
    model[0].reshard()
    with raises(RuntimeError, "parameter '0.weight' was written after a forward"):
        with torch.no_grad():
            model(torch.ones(1, 6))
            model[0].weight.add_(1)
        model(torch.ones(1, 6))
