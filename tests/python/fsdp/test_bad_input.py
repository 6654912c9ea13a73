"""What fully_shard refuses, and how it says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor

from ddp.ranks import RANKLESS_FORM, Tied, batch, message_of, mlp, raises
from fsdp.ranks import (
    SGD_OPTIONS,
    FullyShard,
    gloo_mesh,
    in_training,
    pair,
    shard_layers,
    train_both,
)
from shm.ranks import on_shm_ranks

shard = trireme.fully_shard


def test_without_a_group() -> None:
    with pytest.raises(ValueError) as caught:
        shard(nn.Linear(2, 2))
    assert RANKLESS_FORM.match(message_of(caught.value))


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
def test_arguments(rank: int) -> None:
    """None of these is collective: the ranks stay together."""
    net: Any = nn.Linear(4, 4)
    with raises(ValueError, "[fully_shard] got str, expected a module"):
        shard("model")  # type: ignore[type-var]
    with raises(ValueError, "got no modules"):
        shard([])
    with raises(ValueError, "got a ModuleList, which has no forward"):
        shard(nn.ModuleList([net]))
    with raises(ValueError, "got str as mesh"):
        shard(net, mesh="cpu")  # type: ignore[arg-type]
    with raises(ValueError, "got reshard_after_forward=3, expected a factor of 2"):
        shard(net, reshard_after_forward=3)
    with raises(ValueError, "got reshard_after_forward='yes'"):
        shard(net, reshard_after_forward="yes")  # type: ignore[arg-type]
    with raises(TypeError, "got str as offload_policy"):
        shard(net, offload_policy="cpu")  # type: ignore[arg-type]
    with raises(TypeError, "got str as mp_policy"):
        shard(net, mp_policy="bf16")  # type: ignore[arg-type]
    with raises(AssertionError, "got Shard(dim=2) for 'weight' of shape (4, 4)"):
        shard(net, shard_placement_fn=lambda _: Shard(2))
    with raises(ValueError, "got Replicate() as placement of 'weight'"):
        shard(net, shard_placement_fn=lambda _: Replicate())  # type: ignore[arg-type,return-value]
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    with raises(NotImplementedError, "got 'weight' of layout torch.sparse_coo"):
        shard(sparse)
    scaled = nn.Linear(4, 4)
    scaled.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    with raises(NotImplementedError, "got 'weight' as TwoTensor, a tensor subclass"):
        shard(scaled)
    scaled.weight = nn.Parameter(_Gathered(torch.ones(4, 4)))
    with raises(NotImplementedError, "got 'weight' as _Gathered, a tensor subclass"):
        shard(scaled)
    averaged = trireme.DistributedDataParallel(nn.Linear(4, 4))
    for inside in (averaged, nn.Sequential(averaged)):
        with raises(ValueError, "got a DistributedDataParallel at '", "averages gradients, too"):
            shard(inside)
    for script in (torch.jit.script(mlp()), torch.jit.trace(mlp(), batch(0))):
        with raises(RuntimeError, "got a ScriptModule at ''", "before it is scripted or traced"):
            shard(script)
    assert type(net) is nn.Linear and type(scaled) is nn.Linear


class _Gathered(torch.Tensor):
    """Is like those of torchao, which are gathered in a form of their own."""

    def fsdp_pre_all_gather(self, *_: Any) -> Any:
        raise AssertionError("called")


@on_shm_ranks(4)
def test_meshes_that_do_not_fit(rank: int) -> None:
    net = nn.Linear(4, 4)
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with raises(ValueError, "got a mesh of 3 dimensions"):
        shard(net, mesh=cube)


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
def test_units_in_the_wrong_order(rank: int) -> None:
    net = mlp()
    shard(net)
    with raises(AssertionError, "got FSDPSequential, which is sharded already"):
        shard(net)
    with raises(ValueError, "in an outer unit already", "'weight'"):
        shard(net[0])
    with raises(AssertionError, "which is sharded already"):
        shard(torch_sharded())
    outer = shard_layers(mlp())
    outer[2](torch.ones(2, 13))
    with raises(RuntimeError, "got a first forward of FSDPSequential after one of FSDPLinear"):
        outer(batch(0))
    tied = Tied()
    shard(tied.embed)
    with raises(ValueError, "got 'head.weight', which an inner unit shares", "fully_shard([a, b])"):
        shard(tied)
    pair = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    shard([pair[0], pair[1]])
    with raises(RuntimeError, "got 2 modules as the outermost unit"):
        pair(batch(0))


def torch_sharded() -> nn.Module:
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    return torch_fully_shard(nn.Linear(2, 2), mesh=mesh)


@on_shm_ranks(2)
def test_optimizers_and_states_of_other_models(rank: int) -> None:
    net = mlp()
    before = SGD(net.parameters(), **SGD_OPTIONS)
    shard_layers(net)
    with raises(RuntimeError, "got an optimizer of", "weight", "before fully_shard"):
        before.step()
    other = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    full = StateDictOptions(full_state_dict=True)
    with pytest.raises((RuntimeError, ValueError), match=r"size|shape|Missing|Unexpected"):
        set_model_state_dict(net, other.state_dict(), options=full)
    state = {name: param.full_tensor() for name, param in net.named_parameters()}
    with raises(ValueError, "got a plain tensor for '0.weight', expected a DTensor"):
        net.load_state_dict(state, assign=True)
        net(batch(0))


@on_shm_ranks(2)
def test_parameters_without_values(rank: int) -> None:
    with torch.device("meta"):
        net = mlp()
    shard_layers(net)
    with raises(RuntimeError, "got parameter '0.weight' on the meta device", "to_empty"):
        net(batch(0))


@on_shm_ranks(2)
def test_what_tunes_gathering(rank: int) -> None:
    """What has nothing to do here is accepted."""
    net: Any = shard_layers(mlp())
    for factor in (0.0, -1.0, "2", True):
        with raises(ValueError, f"got factor={factor!r}, expected a number above 0"):
            net.set_gradient_divide_factor(factor)
    net.set_separate_reduce_scatter_group()
    net.set_modules_to_forward_prefetch([net[0]])
    net.set_modules_to_backward_prefetch([net[2]])
    with raises(ValueError, "got Tanh, expected an FSDPModule"):
        net.set_modules_to_forward_prefetch([net[1]])
    net.set_keep_unsharded_storage(True)
    net.set_unshard_in_backward(False)
    net.set_force_sum_reduction_for_comms(True)
    net.set_reduce_scatter_unused_params(True)
    net.set_reduce_scatter_max_input_buffers(2)
    net.set_requires_all_reduce(False)
    net.set_is_last_backward(True)
    with raises(ValueError, "got max_input_buffers=0"):
        net.set_reduce_scatter_max_input_buffers(0)
    with raises(ValueError, "expected a bool"):
        net.set_reshard_after_forward(1)
    training = in_training(net)
    training.train(0)
    with raises(RuntimeError, "got set_manual_backward_finalization() of an inner unit"):
        net[0].set_manual_backward_finalization(True)
    with raises(RuntimeError, "got reset_iter_state() of an inner unit"):
        net[0].reset_iter_state()
    with raises(RuntimeError, "got finalize_backward() without manual finalization"):
        net.finalize_backward()


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
