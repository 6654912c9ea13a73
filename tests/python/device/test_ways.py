"""What one may do with the strategies on a device (devices.py) besides plain steps: it comes to
what one process does on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

from device import sim_device
from device.devices import CUDA, SIM, device_count, device_of, moved, on_device_ranks
from device.training import adamw, check, sharded, train, trained_alone
from harness.faults import raises
from harness.models import batch, mlp
from harness.training import assert_same_on_all_ranks


def _part(step: int, device: torch.device) -> torch.Tensor:
    return batch(step).chunk(dist.get_world_size())[dist.get_rank()].to(device)


@pytest.mark.parametrize("options", [{}, {"offload_policy": trireme.Offload(optimizer=0.5)}])
@on_device_ranks()
def test_fused_optimizer_and_own_clip(rank: int, options: dict[str, Any]) -> None:
    device = device_of(rank)
    model = sharded(device, **options)
    optimizer = trireme.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, device, clip=trireme.clip_grad_norm_)
    check(model, device, trained_alone(), 1e-5)


@on_device_ranks()
def test_accumulation_prefetch_and_unshard(rank: int) -> None:
    device = device_of(rank)
    model: Any = sharded(device)
    first, second, third = (layer for layer in model if isinstance(layer, nn.Linear))
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    optimizer, alone = adamw(model), mlp()
    other = adamw(alone)
    first.unshard(async_op=True).wait()
    for step in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model(_part(3 * step + micro, device)).square().mean().backward()
            alone(batch(3 * step + micro)).square().mean().backward()
        optimizer.step()
        other.step()
    check(model, device, alone, 1e-5)


@on_device_ranks()
def test_all_reduce_hook(rank: int) -> None:
    device = device_of(rank)
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = sharded(device, mesh=mesh)
    seen = []
    model[0].set_all_reduce_hook(lambda sums: seen.append(sums.device))
    train(model, adamw(model), device)
    check(model, device, trained_alone(), 1e-5)
    assert set(seen) == {device}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale + shift


@on_device_ranks()
def test_buffers_that_were_left_on_the_cpu(rank: int) -> None:
    device = device_of(rank)
    model: Any = moved(Scaled(), device)
    model.scale = model.scale.cpu()
    model.register_buffer("later", torch.empty(3, device="meta"))
    trireme.fully_shard(model.body)
    assert model.scale.device.type == "cpu"  # of a unit that is still to come
    trireme.fully_shard(model)
    assert model.scale.device == device and model.later.is_meta
    x, shift = batch(0), torch.ones(3)
    got = model(x.to(device), shift=shift.to(device))
    torch.testing.assert_close(got.cpu(), Scaled()(x, shift=shift), rtol=1e-5, atol=1e-6)


@on_device_ranks()
def test_inputs_that_were_left_on_the_cpu(rank: int) -> None:
    """Those of the outermost forward are moved, keywords too; gradients go back."""
    model: Any = moved(Scaled(), device_of(rank))
    trireme.fully_shard(model.body)
    trireme.fully_shard(model)
    x, same = batch(0).requires_grad_(), batch(0).requires_grad_()
    got, expected = model(x, shift=torch.ones(3)), Scaled()(same, shift=torch.ones(3))
    assert got.device == device_of(rank)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-6)
    got.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=1e-5, atol=1e-6)


@on_device_ranks()
def test_ranks_that_join_early(rank: int) -> None:
    device = device_of(rank)
    model: Any = sharded(device)
    optimizer = adamw(model)
    with Join([model], optimizer=optimizer):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(batch(step).to(device)).square().mean().backward()
            optimizer.step()
    ddp = trireme.DistributedDataParallel(moved(mlp(), device))
    optimizer = adamw(ddp)
    with ddp.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            ddp(batch(step).to(device)).square().mean().backward()
            optimizer.step()
    assert_same_on_all_ranks(list(ddp.parameters()))


@on_device_ranks()
def test_ddp_with_buffers_and_a_hook(rank: int) -> None:
    device = device_of(rank)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = trireme.DistributedDataParallel(moved(net, device))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        model(_part(step, device)).square().mean().backward()
        optimizer.step()
    assert_same_on_all_ranks(list(model.parameters()))


@on_device_ranks(1, kinds=[SIM])
def test_a_checkpoint_of_cpp_in_python(rank: int) -> None:
    """Its early stop is one of Python's there."""
    x = torch.ones(3, requires_grad=True)
    sim_device.core().checkpointed_waves(x).sum().backward()
    (expected,) = torch.autograd.grad(x.sin().exp().cos().sum(), x)
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["ddp", "zero 2", "fully_shard"])
@on_device_ranks(kinds=[CUDA])
def test_grad_scaler(rank: int, strategy: str) -> None:
    """In fp16 under autocast; all ranks leave out the step in which one of them overflows."""
    device = device_of(rank)
    model = sharded(device) if strategy == "fully_shard" else moved(mlp(), device)
    net = trireme.DistributedDataParallel(model) if strategy == "ddp" else model
    optimizer: Any = adamw(model)
    if strategy == "zero 2":
        optimizer = trireme.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, stage=2, lr=0.01
        )
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    expected = mlp()
    other = adamw(expected)
    for step in range(4):
        overflows = step == 1
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = net(_part(step, device)).float().square().mean()
        scaler.scale(loss * (torch.inf if overflows and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (512.0 if step >= 1 else 1024.0)
        if not overflows:
            other.zero_grad()
            expected(batch(step)).square().mean().backward()
            other.step()
    check(model, device, expected, 2e-2)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, branches: bool) -> torch.Tensor:
        return self.trunk(x) + (self.branch(x) if branches else 0)


@on_device_ranks()
def test_ddp_with_parameters_that_not_all_ranks_use(rank: int) -> None:
    device = device_of(rank)
    alone = Branches()
    net = moved(copy.deepcopy(alone), device)
    model = trireme.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer, other = adamw(model), adamw(alone)
    for step in range(5):
        optimizer.zero_grad()
        other.zero_grad()
        model(_part(step, device), step % 3 == rank).square().mean().backward()
        parts = batch(step).chunk(2)
        for half in range(2):
            (alone(parts[half], step % 3 == half).square().mean() / 2).backward()
        optimizer.step()
        other.step()
    for found, expected in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)


# A copy to a GPU waits in CUDA for what is enqueued before it; a rank hears nothing meanwhile.
@on_device_ranks(timeout=60, kinds=[SIM])
def test_the_others_hear_of_an_exception(rank: int) -> None:
    device = device_of(rank)
    model: Any = sharded(device)
    optimizer = adamw(model)
    train(model, optimizer, device)
    if rank == 1:
        model[2].register_forward_pre_hook(_fail)
        with pytest.raises(ValueError, match="spilled the coffee"):
            train(model, optimizer, device)
    else:
        parts = ("a peer announced", "ValueError: spilled the coffee")
        with raises(dist.DistBackendError, *parts):
            for _ in range(1000):  # its device waits in vain; it goes on to enqueue
                model(_part(0, device)).square().mean().backward()


def _fail(*_: Any) -> None:
    raise ValueError("spilled the coffee")


@on_device_ranks(1)
def test_data_parallel_over_devices(rank: int) -> None:
    device = device_of(rank)
    expected = trained_alone()
    for count in range(1, min(3, device_count()) + 1):
        net = moved(mlp(), device)
        model = trireme.DataParallel(net, device_ids=list(range(count)))
        optimizer = adamw(net)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step).to(device)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        check(net, device, expected, 1e-5)
