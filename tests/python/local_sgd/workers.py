"""Workers of two ranks on hosts that are pretended, with a strategy inside of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import AdamW

from fsdp.ranks import shard_layers
from harness.models import batch, mlp
from harness.pretended_hosts import LAYOUTS

Made = tuple[nn.Module, nn.Module, Any]


def my_host(rank: int, layout: str) -> dist.ProcessGroup:
    """The group of the ranks on this one's host."""
    hosts = LAYOUTS[layout]
    groups = {
        host: dist.new_group([other for other, at in enumerate(hosts) if at == host])
        for host in sorted(set(hosts))
    }
    return groups[hosts[rank]]


def _ddp(group: dist.ProcessGroup) -> Made:
    model = mlp()
    net = trireme.DistributedDataParallel(model, process_group=group)
    return model, net, AdamW(model.parameters(), lr=0.02)


def _torch_ddp(group: dist.ProcessGroup) -> Made:
    model = mlp()
    return model, TorchDDP(model, process_group=group), AdamW(model.parameters(), lr=0.02)


def _zero(stage: int) -> Callable[[dist.ProcessGroup], Made]:
    def make(group: dist.ProcessGroup) -> Made:
        model = mlp()
        net = trireme.DistributedDataParallel(model, process_group=group) if stage == 1 else model
        optimizer = trireme.ZeroRedundancyOptimizer(
            model.parameters(), AdamW, stage=stage, process_group=group, lr=0.02
        )
        return model, net, optimizer

    return make


def _fully_shard(group: dist.ProcessGroup) -> Made:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = mlp()
    shard_layers(model, mesh=mesh)
    return model, model, AdamW(model.parameters(), lr=0.02)


STRATEGIES = {
    "ddp": _ddp,
    "torch's ddp": _torch_ddp,
    "zero 1": _zero(1),
    "zero 2": _zero(2),
    "fully_shard": _fully_shard,
}


def own(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def steps(rank: int, net: nn.Module, optimizer: Any, first: int, last: int) -> None:
    """The rows of a worker are shared by its ranks."""
    worker, place = divmod(rank, 2)
    for step in range(first, last):
        optimizer.zero_grad()
        rows = batch(step, rows=12)[worker::2]
        net(rows[place::2]).square().mean().backward()
        optimizer.step()
