"""What the tests of checkpoints share: one model under every strategy, and what it holds.

The oracle is the safetensors package: what it reads from the files is what every strategy must have
saved, and what every other must hold after loading.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trireme
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harness.models import Shapes
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits
from harness.training import Training
from zero.ranks import whole_state

# Strategy and number of ranks.
CASES = (
    ("plain", 1),
    ("ddp", 2),
    ("zero1", 3),
    ("zero2", 2),
    ("fsdp", 2),
    ("fsdp", 3),
    ("hsdp", 4),
)


class Net(Shapes):
    """Shapes, and a buffer that is saved, one that is not, a tied weight, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase.requires_grad_(False)  # torch's AdamW does not step complex DTensors
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.again = nn.Linear(6, 13, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.again(x).sum(1, keepdim=True).square()


def make(
    strategy: str,
    optimizer_class: Any = torch.optim.AdamW,
    make_model: Callable[[], nn.Module] = Net,
    *,
    elsewhere: bool = False,
    **defaults: Any,
) -> Training:
    """A model and its optimizer on this rank; ``elsewhere``: with other values than usual."""
    model = make_model()
    if elsewhere:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)
    options = {"lr": 0.5 if elsewhere else 0.01, **defaults}
    net = model
    if strategy in ("ddp", "zero1"):
        net = trireme.DistributedDataParallel(model)
    if strategy in ("fsdp", "hsdp"):
        mesh = None
        if strategy == "hsdp":
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)
        for child in model.children():
            # Only what is called may be a unit, and what is tied belongs to one unit.
            if isinstance(child, nn.Linear) and child.weight.dtype == torch.float64:
                trireme.fully_shard(child, mesh=mesh)
        trireme.fully_shard(model, mesh=mesh)
    optimizer: Any
    if strategy.startswith("zero"):
        stage = int(strategy[-1])
        optimizer = trireme.ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class, stage=stage, **options
        )
    else:
        optimizer = optimizer_class(model.parameters(), **options)
    if strategy == "plain":
        return Training(model, net, optimizer)
    return Training(model, net, optimizer, dist.get_rank(), dist.get_world_size())


def save(training: Training, path: Any, **options: Any) -> trireme.PendingSave:
    return trireme.save_checkpoint(path, training.net, training.optimizer, **options)


def load(training: Training, path: Any) -> dict[str, Any]:
    return trireme.load_checkpoint(path, training.net, training.optimizer)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def held(training: Training) -> dict[str, torch.Tensor]:
    """Whole values on every rank: what the model has and, by ``<parameter>.<key>``, the optimizer's
    states."""
    if isinstance(training.model, FSDPModule):
        for module in training.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    named = dict(training.model.named_parameters())
    found = {name: _whole(param) for name, param in named.items()}
    found |= {name: value.clone() for name, value in training.model.named_buffers()}
    found.pop("scratch", None)
    optimizer = training.optimizer
    if isinstance(optimizer, trireme.ZeroRedundancyOptimizer):
        states = whole_state(optimizer)["state"]
    else:
        params = optimizer.param_groups[0]["params"]
        states = {number: optimizer.state.get(param, {}) for number, param in enumerate(params)}
    for name, state in zip(named, (states.get(i, {}) for i in range(len(named))), strict=True):
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and named[name].numel() > 0:
                found[f"{name}.{key}"] = _whole(value)
    return found


def on_disk(path: str) -> dict[str, torch.Tensor]:
    """What another program finds in the files, but for states of what has no elements."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        found |= load_file(file)
    return {name: value for name, value in found.items() if not name.startswith("empty.")}


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Turns one bit over in place, so that the file has its size for whoever looks meanwhile.

    ``place`` may count from the end.
    """
    with path.open("r+b") as file:
        at = file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def assert_holds(training: Training, expected: dict[str, torch.Tensor]) -> None:
    """Compares bits, and refuses whatever else is there."""
    got = held(training)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_bits(got[name], value, name)


def most_allocated(call: Callable[[], Any]) -> int:
    """Bytes held at the fullest moment of ``call`` beyond those at its begin."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    results = profile.profiler.kineto_results.events()
    events = [event for event in results if event.name() == "[memory]"]
    most = total = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def state_bytes(optimizer: Any) -> int:
    """Counts those of this rank."""
    inner = optimizer.optim if isinstance(optimizer, trireme.ZeroRedundancyOptimizer) else optimizer
    values = [value for state in inner.state.values() for value in state.values()]
    locals_ = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum(tensor.nbytes for tensor in locals_)


@on_shm_ranks("world")
def run_on_ranks(rank: int, world: int, program: Callable[..., None], case: Any) -> None:
    """Calls ``program(rank, **case)`` on each of ``world`` ranks."""
    program(rank, **case)
