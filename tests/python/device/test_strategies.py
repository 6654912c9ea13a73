"""The strategies on a device with streams and an engine of its own (devices.py): they train as
one process does on the whole batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from device.devices import device_of, moved, on_device_ranks
from device.training import STEPS, adamw, check, sharded, train, trained_alone
from harness.models import batch, mlp


@pytest.mark.parametrize("static_graph", [False, True])
@on_device_ranks()
def test_ddp(rank: int, static_graph: bool) -> None:
    device = device_of(rank)
    model = trireme.DistributedDataParallel(moved(mlp(), device), static_graph=static_graph)
    train(model, adamw(model), device)
    check(model, device, trained_alone(), 1e-5)


@pytest.mark.parametrize("stage", [1, 2])
@on_device_ranks(3)
def test_zero(rank: int, stage: int) -> None:
    device = device_of(rank)
    model = moved(mlp(), device)
    net = trireme.DistributedDataParallel(model) if stage == 1 else model
    optimizer = trireme.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, stage=stage, host_params=False, lr=0.01
    )
    weights = [8 // 3 + (1 if peer < 8 % 3 else 0) for peer in range(3)]
    for step in range(STEPS):
        optimizer.zero_grad()
        part = batch(step).split(weights)[rank].to(device)
        # Parts of different length: of the mean over all rows.
        (net(part).square().sum() * 3 / batch(step)[:, :3].numel()).backward()
        optimizer.step()
    check(model, device, trained_alone(clips=False), 1e-5)
    optimizer.consolidate_state_dict(to=0)  # with step counts, which lie on the CPU
    if rank == 0:
        state = optimizer.state_dict()["state"]
        assert {int(values["step"]) for values in state.values()} == {STEPS}
        assert len(state) == len(list(model.parameters()))


@pytest.mark.parametrize("reshard", [None, True, False])
@on_device_ranks()
def test_fully_shard(rank: int, reshard: bool | None) -> None:
    device = device_of(rank)
    model = sharded(device, reshard_after_forward=reshard)
    assert all(parameter.device == device for parameter in model.parameters())
    train(model, adamw(model), device)
    expected = trained_alone()
    check(model, device, expected, 1e-5)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(whole[name].cpu(), value, rtol=1e-5, atol=1e-6)


@on_device_ranks(alone=True)
def test_fully_shard_without_an_engine_for_the_cpu(rank: int) -> None:
    device = device_of(rank)
    model = sharded(device)
    train(model, adamw(model), device)
    check(model, device, trained_alone(), 1e-5)
    assert trireme.all_mean(float(rank)) == 0.5


@on_device_ranks()
def test_mixed_precision(rank: int) -> None:
    device = device_of(rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(device, mp_policy=policy)
    train(model, adamw(model), device)
    check(model, device, trained_alone(), 2e-2)


@pytest.mark.parametrize("kind", ["hsdp", "pieces"])
@on_device_ranks(4)
def test_meshes_of_four(rank: int, kind: str) -> None:
    device = device_of(rank)
    if kind == "hsdp":
        names = ("replicate", "shard")
        model = sharded(device, mesh=init_device_mesh(device.type, (2, 2), mesh_dim_names=names))
    else:
        model = sharded(device, reshard_after_forward=2)
    train(model, adamw(model), device)
    check(model, device, trained_alone(), 1e-5)


@pytest.mark.parametrize(
    "policy",
    [trireme.Offload(optimizer=0.5, params=0.25), trireme.Offload(1, 0), CPUOffloadPolicy()],
)
@on_device_ranks()
def test_offload(rank: int, policy: Any) -> None:
    device = device_of(rank)
    model = sharded(device, offload_policy=policy)
    offloaded = [parameter for parameter in model.parameters() if parameter.device.type == "cpu"]
    assert offloaded
    assert all(shard.to_local().is_pinned() for shard in offloaded if shard.to_local().numel() > 0)
    optimizer = adamw(model)
    train(model, optimizer, device)
    check(model, device, trained_alone(), 1e-5)


@on_device_ranks()
def test_checkpoint(rank: int, tmp_path: Path) -> None:
    device = device_of(rank)
    model = sharded(device)
    optimizer = adamw(model)
    train(model, optimizer, device)
    trireme.save_checkpoint(tmp_path / "saved", model, optimizer)
    again = sharded(device, offload_policy=trireme.Offload(optimizer=0.5))
    other = adamw(again)
    trireme.load_checkpoint(tmp_path / "saved", again, other)
    for model_of, optimizer_of in ((model, optimizer), (again, other)):
        train(model_of, optimizer_of, device)
    check(again, device, copy.deepcopy(_whole(model)), 1e-5)


def _whole(model: nn.Module) -> nn.Module:
    plain = mlp()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    plain.load_state_dict({name: value.cpu() for name, value in whole.items()})
    return plain
