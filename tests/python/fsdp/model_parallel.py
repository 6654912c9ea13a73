"""What the tests of fully_shard beside tensor parallelism share: a model, its plan, meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD

from fsdp.ranks import FullyShard, local
from harness.training import assert_close

WORDS, LENGTH, ROWS = 17, 4, 8
NAMES = ("dp", "tp")


class Block(nn.Module):
    """Computes on DTensors or on plain tensors, as it is told by the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 14)
        self.down = nn.Linear(14, 8)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).tanh())


class Language(nn.Module):
    """Rows of the embedding, of ``up`` and of the head are uneven; ``scale`` is on no mesh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, 8)
        self.block = Block()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, words: torch.Tensor) -> Any:
        return self.head(self.norm(self.block(self.embed(words)))) * self.scale


def plan() -> dict[str, Any]:
    """Between modules the sequence is cut into parts; the output is whole."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def grid(*sizes: int, names: tuple[str, ...] = NAMES, backend: str | None = None) -> DeviceMesh:
    override = {} if backend is None else {"backend_override": dict.fromkeys(names, backend)}
    return init_device_mesh("cpu", sizes or (2, 2), mesh_dim_names=names, **override)  # type: ignore[arg-type]


def build(
    mesh: DeviceMesh,
    shard: FullyShard = trireme.fully_shard,
    make: Callable[[], nn.Module] = Language,
    **options: Any,
) -> Any:
    """Cut along ``tp``, then sharded along the other dimensions, the block as a unit."""
    model = parallelize_module(make(), mesh["tp"], plan())
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    data: Any = mesh[names if len(names) > 1 else names[0]]
    shard(model.block, mesh=data, **options)
    return shard(model, mesh=data, **options)


def build_torchs(mesh: DeviceMesh, **options: Any) -> Any:
    """Builds it by torch's class, over Gloo; on a mesh of the same shape."""
    theirs = grid(*mesh.mesh.shape, names=tuple(mesh.mesh_dim_names or ()), backend="gloo")
    return build(theirs, torch_fully_shard, **options)


def words(step: int) -> torch.Tensor:
    """The whole batch."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)


def own_words(step: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part: ranks that differ along ``tp`` have the same."""
    share = mesh.size() // mesh["tp"].size()
    number = dist.get_rank() // mesh["tp"].size()
    return words(step)[number::share]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows).float().square().mean()
    return loss


def backward(model: Any, mesh: Any, *steps: int) -> None:
    """One backward for each batch, of which the last one averages."""
    for step in steps:
        model.set_requires_gradient_sync(step == steps[-1])
        loss_of(model, own_words(step, mesh)).backward()


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """What this rank has: of its part of the model a part, each by torch.chunk's rule."""
    names = like.device_mesh.mesh_dim_names or ()
    for index in sorted(range(len(names)), key=lambda index: names[index] != "tp"):
        placement = like.placements[index]
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        dim, parts = placement.dim, like.device_mesh.size(index)
        most = -(-whole.shape[dim] // parts)
        begin = min(like.device_mesh.get_coordinate()[index] * most, whole.shape[dim])
        whole = whole.narrow(dim, begin, min(most, whole.shape[dim] - begin))
    return whole


def assert_parts(ours: nn.Module, one: nn.Module, *, grads: bool = False, **tolerance: Any) -> None:
    """What this rank has are parts of what one process has."""
    for name, whole in one.named_parameters():
        param: Any = ours.get_parameter(name)
        assert isinstance(param, DTensor), name
        expected = whole.grad if grads else whole.detach()
        got = param.grad if grads else param
        part = None if expected is None else part_of(expected, param)
        assert_close(f"{name}{'.grad' * grads}", local(got), part, **tolerance)


def assert_like_torchs(ours: nn.Module, theirs: nn.Module) -> None:
    """Placed alike."""
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        placed: Any = (one, other)
        got, expected = ((x.placements, x.device_mesh.mesh_dim_names, x.shape) for x in placed)
        assert got == expected, (name, got, expected)
        assert one.stride() == other.stride() and one.requires_grad == other.requires_grad, name
        shapes = [x.to_local().shape for x in placed]
        assert shapes[0] == shapes[1], (name, shapes)
