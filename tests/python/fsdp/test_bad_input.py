"""What fully_shard refuses beside its arguments, for which see contract/bad_arguments.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp.ranks import (
    FullyShard,
    gloo_mesh,
    in_training,
    pair,
    shard_layers,
    train_both,
)
from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_shm_ranks

shard = trireme.fully_shard


@on_shm_ranks(2)
def test_layers_that_come_late(rank: int) -> None:
    """Nobody would average their gradients; what changes nothing of that may come and go."""
    ignored = nn.Linear(3, 3)
    ours = in_training(
        shard(nn.Sequential(*mlp(), ignored), ignored_params=set(ignored.parameters()))
    )
    ours.train(0)
    ours.model.append(nn.Tanh())
    ours.model.append(nn.Linear(3, 3).requires_grad_(False))
    ours.train(1)

    def add(model: nn.Module) -> None:
        model.append(nn.Linear(3, 4))

    def replace(model: nn.Module) -> None:
        model[4] = nn.Linear(5, 3)

    def assign(model: nn.Module) -> None:
        model[2].load_state_dict({"weight": torch.ones(5, 13)}, assign=True)

    def reshape(model: nn.Module) -> None:
        model[4].weight = nn.Parameter(torch.ones(7, 5))

    def register(model: nn.Module) -> None:
        model[0].scale = nn.Parameter(torch.ones(()))

    late = "which came after fully_shard"
    cases = [
        (add, f"got '5.weight' of shape (4, 3), {late}"),
        (replace, f"got '4.weight' of shape (3, 5), {late}"),
        (assign, "got a plain tensor for '2.weight'"),
        (reshape, "got a plain tensor for '4.weight'"),
        (register, f"got '0.scale' of shape (), {late}"),
    ]
    for change, text in cases:
        ours = in_training(shard(mlp()))
        ours.train(0)
        with raises(ValueError, "[fully_shard] ", text):
            change(ours.model)
            ours.train(1)


@on_shm_ranks(2)
def test_what_was_refused_is_as_it_was(rank: int) -> None:
    net = nn.Linear(4, 4)
    with raises(TypeError, "got str as mp_policy"):
        shard(net, mp_policy="bf16")  # type: ignore[arg-type]
    assert type(net) is nn.Linear
    net.weight = nn.Parameter(torch.eye(4).to_sparse())
    with raises(NotImplementedError, "got 'weight' of layout torch.sparse_coo"):
        shard(net)
    assert type(net) is nn.Linear


@on_shm_ranks(3)
def test_ranks_and_devices_outside_of_the_mesh(rank: int) -> None:
    two = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        with raises(ValueError, "got DeviceMesh", "in which this rank is not"):
            shard(nn.Linear(4, 4), mesh=two)
        return
    elsewhere = nn.Linear(4, 4)
    elsewhere.weight = nn.Parameter(_Elsewhere(elsewhere.weight.detach()))
    with raises(ValueError, "got 'weight' on cuda:0, expected it on cpu, where the mesh is"):
        shard(elsewhere, mesh=two)
    shard(nn.Linear(4, 4), mesh=two)


class _Elsewhere(torch.Tensor):
    """Says that it is on a device that this machine need not have."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@on_shm_ranks(2)
def test_a_mesh_over_gloo(rank: int) -> None:
    """Its units are gathered, also under the root of others."""
    mesh = gloo_mesh()

    def mixed(model: nn.Module, shard: FullyShard = shard) -> nn.Module:
        shard(model[0], mesh=mesh)
        return shard(model)

    train_both(*pair(mlp, options={"mesh": mesh}), 0)
    ours, one = pair(mlp, shard=mixed)
    for step in range(3):
        train_both(ours, one, step)


@on_shm_ranks(2)
def test_the_state_of_another_model(rank: int) -> None:
    net = shard_layers(mlp())
    other = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    full = StateDictOptions(full_state_dict=True)
    with pytest.raises((RuntimeError, ValueError), match=r"size|shape|Missing|Unexpected"):
        set_model_state_dict(net, other.state_dict(), options=full)


@on_shm_ranks(2)
def test_what_has_nothing_to_tune_here_is_accepted(rank: int) -> None:
    net: Any = shard_layers(mlp())
    net.set_separate_reduce_scatter_group()
    net.set_modules_to_forward_prefetch([net[0]])
    net.set_modules_to_backward_prefetch([net[2]])
    net.set_keep_unsharded_storage(True)
    net.set_unshard_in_backward(False)
    net.set_force_sum_reduction_for_comms(True)
    net.set_reduce_scatter_unused_params(True)
    net.set_reduce_scatter_max_input_buffers(2)
    net.set_requires_all_reduce(False)
    net.set_is_last_backward(True)
    in_training(net).train(0)


@on_shm_ranks(2)
def test_every_public_name_of_torchs_class_is_ours(rank: int) -> None:
    """A method of the installed torch that we do not know would reach into torch's own state."""
    theirs = torch.distributed.fsdp.FSDPModule
    ours = trireme.FSDPModule
    for name, value in vars(theirs).items():
        if callable(value) and not name.startswith("__"):
            assert getattr(ours, name) is not value, name


@on_shm_ranks(2)
def test_policies(rank: int) -> None:
    net = nn.Linear(4, 4)
    shard(net, offload_policy=CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy())
    loss = net(torch.ones(1, 4)).sum()
    loss.backward()
    assert math.isfinite(loss.item())
