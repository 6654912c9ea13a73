"""torch's own parallel classes, unchanged, on the backend ``trireme``: the same as on Gloo.

With two ranks a sum has one order, so that losses and parameters are compared to the last bit.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.models import batch, mlp
from harness.ranks import run_ranks

WORLD = 2
BACKENDS = ("gloo", "trireme")

Result = list[torch.Tensor]


def on_both(program: Callable[..., Result], *case: Any, world: int = WORLD) -> list[list[Result]]:
    """What every rank gets over Gloo and over shared memory."""
    return [run_ranks(under, world, backend, program, case, timeout=90) for backend in BACKENDS]


def under(rank: int, backend: str, program: Callable[..., Result], case: Any) -> Result:
    dist.init_process_group(backend, timeout=timedelta(seconds=40))
    torch.manual_seed(0)
    result = program(rank, *case)
    dist.destroy_process_group()
    return result


def assert_same(over_gloo: list[Result], over_memory: list[Result]) -> None:
    for theirs, ours in zip(over_gloo, over_memory, strict=True):
        assert len(theirs) == len(ours) > 0
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            assert torch.equal(one, other), (index, one, other)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 4) -> Result:
    """The losses, then the whole parameters."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)[rank::WORLD]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(whole(parameter) for parameter in model.parameters())]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    detached = parameter.detach()
    return (detached.full_tensor() if isinstance(detached, DTensor) else detached).clone()


# --- DDP -----------------------------------------------------------------------------------------


def ddp(rank: int, options: dict[str, Any]) -> Result:
    """Several buckets, a buffer that is broadcast, and a backward under no_sync."""
    layers = nn.Sequential(
        nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 700), nn.Linear(700, 3)
    )
    model = TorchDDP(layers, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if "static_graph" not in options:  # torch has no no_sync in its first step
        with model.no_sync():
            model(batch(9)[rank::WORLD]).sum().backward()
    results = train(model, optimizer, rank)
    return [*results, *(buffer.double() for buffer in model.buffers())]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=["plain", "views", "unused", "static"],
)
def test_ddp(options: dict[str, Any]) -> None:
    over_gloo, over_memory = on_both(ddp, options)
    assert_same(over_gloo, over_memory)
    for one, other in zip(over_memory[0][4:-3], over_memory[1][4:-3], strict=True):
        assert torch.equal(one, other)


def ddp_with_hook(rank: int) -> Result:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = TorchDDP(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)


def test_ddp_with_a_hook_of_torch() -> None:
    """It chains onto the futures of async operations."""
    assert_same(*on_both(ddp_with_hook))


def ddp_joined(rank: int) -> Result:
    model = TorchDDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        return train(model, optimizer, rank, steps=3 + 2 * rank)[:3]


def test_ddp_joined_with_uneven_steps() -> None:
    assert_same(*on_both(ddp_joined))


# --- Sharded -------------------------------------------------------------------------------------


def zero_redundancy(rank: int, overlapping: bool) -> Result:
    model = TorchDDP(mlp(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=overlapping
    )
    results = train(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()["state"]
        results += [state[index]["exp_avg"] for index in sorted(state)]
    return results


@pytest.mark.parametrize("views", [False, True])
def test_zero_redundancy_optimizer(views: bool) -> None:
    assert_same(*on_both(zero_redundancy, views))


def sharded_mlp(**options: Any) -> nn.Module:
    model = mlp()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp(rank: int, options: dict[str, Any]) -> Result:
    model = sharded_mlp(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = train(model, optimizer, rank, steps=3)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [*results, norm.full_tensor() if isinstance(norm, DTensor) else norm]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ],
    ids=["plain", "no reshard", "bf16 and fp32", "bf16"],
)
def test_fsdp(options: dict[str, Any]) -> None:
    assert_same(*on_both(fsdp, options))


def hybrid_fsdp(rank: int) -> Result:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(mlp(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)[rank::4]).square().mean().backward()
        optimizer.step()
    return [whole(parameter) for parameter in model.parameters()]


def test_hybrid_fsdp() -> None:
    """Shards inside pairs, replicas across: two groups per rank, both in one backward."""
    for theirs, ours in zip(*on_both(hybrid_fsdp, world=4), strict=True):
        torch.testing.assert_close(ours, theirs)


# --- Checkpoints ---------------------------------------------------------------------------------


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save_and_load(rank: int, folder: str, asynchronous: bool) -> Result:
    model = sharded_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank)
    state = state_of(model, optimizer)
    if asynchronous:
        # On a thread and a group of its own, while this one trains on.
        saved = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
        saved_parameters = [whole(parameter) for parameter in model.parameters()]
        train(model, optimizer, rank)
        saved.result(timeout=60)
    else:
        dcp.save(state, checkpoint_id=folder)
        saved_parameters = [whole(parameter) for parameter in model.parameters()]

    torch.manual_seed(99)
    other = sharded_mlp()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    state = state_of(other, other_optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for got, expected in zip(other.parameters(), saved_parameters, strict=True):
        assert torch.equal(whole(got), expected)
    return train(other, other_optimizer, rank)  # goes on where the saved one was


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints(asynchronous: bool, tmp_path: Path) -> None:
    results = [
        run_ranks(under, WORLD, backend, save_and_load, (f"{tmp_path}/{backend}", asynchronous))
        for backend in BACKENDS
    ]
    assert_same(*results)


def load_elsewhere(rank: int, folder: str) -> Result:
    """Two ranks saved it, three read it."""
    mesh = init_device_mesh("cpu", (3,))
    state = {
        name: distribute_tensor(torch.zeros_like(value), mesh)
        for name, value in mlp().state_dict().items()
    }
    dcp.load(state, checkpoint_id=folder)
    return [value.full_tensor() for value in state.values()]


def save_only(rank: int, folder: str) -> Result:
    dcp.save(sharded_mlp().state_dict(), checkpoint_id=folder)
    return [torch.zeros(1)]


def test_a_checkpoint_of_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(under, 2, "trireme", save_only, (str(tmp_path),))
    for got in run_ranks(under, 3, "trireme", load_elsewhere, (str(tmp_path),)):
        for value, expected in zip(got, mlp().state_dict().values(), strict=True):
            assert torch.equal(value, expected)
