"""HSDP where replicas do not come to their sums at the same time, or not at all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

from fsdp.ranks import in_training
from harness.faults import HOUSE_FORM
from harness.ranks import run_ranks
from harness.training import alone

STEPS = 40
WIDTH = 520  # a layer is a bucket of its own


def wide() -> nn.Module:
    torch.manual_seed(0)
    narrow = nn.Linear(6, WIDTH)
    return nn.Sequential(narrow, *(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def train_on_two_meshes(rank: int, backend: str) -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    torch.set_num_threads(1)
    flat = init_device_mesh("cpu", (2,))
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = wide()
    for number, layer in enumerate(model):
        trireme.fully_shard(layer, mesh=replicas if number % 2 else flat)
    trireme.fully_shard(model, mesh=replicas)
    ours, one = in_training(model, lr=0.01), alone(wide, SGD, lr=0.01)
    for step in range(STEPS):
        ours.train(step)
        one.train(step)
    for mine, whole in zip(model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), whole)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "trireme"])
def test_sums_of_some_units_between_gathers_of_others(backend: str) -> None:
    """Ranks come to both at different times; the groups of the meshes are one group."""
    run_ranks(train_on_two_meshes, 2, backend)


def fail(*args: Any) -> None:
    raise ArithmeticError("in backward")


def raise_on_rank_0(rank: int, backend: str) -> str | None:
    dist.init_process_group(backend)
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = wide()
    for layer in model:
        trireme.fully_shard(layer, mesh=replicas)
    ours = in_training(trireme.fully_shard(model, mesh=replicas))
    ours.train(0)
    hook = ours.model[3].register_full_backward_hook(fail) if rank == 0 else None
    text = None
    try:
        ours.backward(1)
    except ArithmeticError:
        text = "ours"
    except dist.DistBackendError as error:
        text = str(error)
    if backend == "trireme":  # goes on with the next step
        if hook is not None:
            hook.remove()
        ours.optimizer.zero_grad()
        for step in range(2, 4):
            ours.train(step)
            for mine in ours.model.parameters():
                assert torch.isfinite(mine.to_local()).all()
    return text


@pytest.mark.parametrize("backend", ["gloo", "trireme"])
def test_an_exception_is_told_to_replicas(backend: str) -> None:
    texts = run_ranks(raise_on_rank_0, 2, backend, fresh=True)
    assert texts[0] == "ours"
    assert texts[1] is not None and HOUSE_FORM.match(texts[1]), texts
    assert "was abandoned" in texts[1]
