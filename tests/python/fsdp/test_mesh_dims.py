"""dp_mesh_dims: parameters are DTensors on a mesh of all dimensions, of which fully_shard takes
some; and where ``shard_placement_fn`` may place a parameter.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import trireme
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp.model_parallel import assert_parts, grid, sgd
from fsdp.ranks import FullyShard, assert_locals, run_programs
from harness.faults import raises
from harness.on_ranks import BACKENDS
from shm.ranks import TORCH

HAS_DIMS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


@functools.cache
def mesh_of(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    """One object: torch's class compares meshes by identity."""
    return grid(*sizes, names=names)


def forget_meshes(rank: int) -> None:
    """Those of a group that ends with its test."""
    mesh_of.cache_clear()


def dims(**names: Any) -> Any:
    return torch.distributed.fsdp.DataParallelMeshDims(**names)  # type: ignore[attr-defined]


class Net(nn.Module):
    """Takes this rank's rows, computes on DTensors and returns this rank's sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight: Any = self.down.weight  # unsharded here
        if not isinstance(weight, DTensor):
            return self.down(self.up(rows).tanh())
        mesh = weight.device_mesh
        is_data = [name != "tp" for name in mesh.mesh_dim_names or ()]
        by_rows = [Shard(0) if data else Replicate() for data in is_data]
        out: Any = self.down(self.up(DTensor.from_local(rows, mesh, by_rows)).tanh())
        local: torch.Tensor = out.redistribute(mesh, by_rows).to_local()
        return local


def distribute(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """``up`` by columns, ``down`` by rows, replicated along data parallel dimensions."""
    cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for name, param in list(module.named_parameters()):
        placements = [Replicate()] * mesh.ndim
        if name in cuts:
            placements[(mesh.mesh_dim_names or ()).index("tp")] = Shard(cuts[name])  # type: ignore[call-overload]
        owner = module.get_submodule(name.partition(".")[0])
        placed = distribute_tensor(param.detach(), mesh, placements)
        setattr(owner, name.partition(".")[2], nn.Parameter(placed))
    return module


def build(mesh: DeviceMesh, names: Any, shard: FullyShard = trireme.fully_shard) -> Any:
    model = distribute(Net(), mesh)
    shard(model.up, mesh=mesh, dp_mesh_dims=names)  # type: ignore[attr-defined]
    return shard(model, mesh=mesh, dp_mesh_dims=names)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def own_rows(step: int, mesh: DeviceMesh) -> torch.Tensor:
    names = mesh.mesh_dim_names or ()
    number, share = 0, 1
    for name, at in zip(names, mesh.get_coordinate() or (), strict=True):
        if name != "tp":
            number, share = number * mesh[name].size() + at, share * mesh[name].size()
    return batch(step).chunk(share)[number]


def train_both(mesh: DeviceMesh, names: Any) -> Any:
    """Trains beside torch's class on the same mesh, and beside one process."""
    ours, theirs = build(mesh, names), build(mesh, names, torch_fully_shard)
    one = Net()
    trainings = [(model, sgd(model)) for model in (ours, theirs, one)]
    for name, param in ours.named_parameters():
        like = theirs.get_parameter(name)
        got, expected = (
            (x.placements, x.device_mesh.mesh_dim_names, x.device_mesh.mesh.tolist())
            for x in (param, like)
        )
        assert got == expected, (name, got, expected)
    for step in range(2):
        for model, optimizer in trainings:
            optimizer.zero_grad()
            rows = batch(step) if model is one else own_rows(step, mesh)
            model(rows).square().mean().backward()
        assert_locals(ours, theirs)
        assert_parts(ours, one, grads=True)
        for _, optimizer in trainings:
            optimizer.step()
        assert_parts(ours, one)
    return ours


def on_two_dimensions(rank: int) -> None:
    for names in (("dp", "tp"), ("tp", "dp")):
        model = train_both(mesh_of(names=names), dims(shard="dp"))
        at = names.index("dp")
        own = _StridedShard(0, split_factor=2) if at == 0 else Shard(0)
        assert model.up.weight.placements[at] == own
        assert model.down.weight.placements[at] == Shard(0)


def replicated_only(rank: int) -> None:
    """Each rank has all of its part of the model, and the average of its gradients."""
    model = train_both(mesh_of(names=("dp", "tp")), dims(replicate="dp"))
    assert model.up.weight.placements == (Replicate(), Shard(0))
    assert model.up.weight.to_local().shape == (5, 6)
    norm = trireme.clip_grad_norm_(model.parameters(), 1e9)
    of_one = Net()
    of_one.load_state_dict(
        {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    )
    grads = [param.grad.full_tensor() for param in model.parameters()]
    torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in grads]).norm())


def on_three_dimensions(rank: int) -> None:
    """Replicated and sharded; two dimensions sharded as one."""
    names = ("rep", "dp", "tp")
    model = train_both(mesh_of(2, 1, 2, names=names), dims(shard="dp", replicate="rep"))
    assert model.down.weight.placements == (Replicate(), Shard(0), Shard(1))
    names = ("dp", "cp", "tp")
    model = train_both(mesh_of(2, 2, 1, names=names), dims(shard=("dp", "cp")))
    assert model.down.weight.device_mesh.mesh_dim_names == ("dp_cp", "tp")
    assert model.down.weight.placements == (Shard(0), Shard(1))


@pytest.mark.skipif(not HAS_DIMS, reason="this torch has no dp_mesh_dims")
@BACKENDS
def test_dimensions_of_a_mesh(backend: str) -> None:
    run_programs(backend, 4, on_two_dimensions, replicated_only, forget_meshes)


@pytest.mark.skipif(not HAS_DIMS, reason="this torch has no dp_mesh_dims")
def test_dimensions_put_together() -> None:
    run_programs("gloo", 4, on_three_dimensions, forget_meshes)


def refused(rank: int) -> None:
    mesh = grid()
    net = distribute(Net(), mesh)

    def shard(module: Any, names: Any, of: Any = mesh) -> None:
        trireme.fully_shard(module, mesh=of, dp_mesh_dims=names)

    with raises(TypeError, "got str as dp_mesh_dims"):
        shard(net, "dp")
    with raises(ValueError, "got dp_mesh_dims with 'pp', expected names of the mesh: ('dp', 'tp')"):
        shard(net, dims(shard="pp"))
    with raises(ValueError, "got None as mesh, expected one with names"):
        shard(net, dims(shard="dp"), None)
    with raises(ValueError, "expected one with names"):
        shard(net, dims(shard="dp"), DeviceMesh("cpu", [0, 1, 2, 3]))
    with raises(ValueError, "which names a dimension twice"):
        shard(net, dims(shard="dp", replicate="dp"))
    with raises(ValueError, "got 'up.weight', which is a plain tensor"):
        shard(Net(), dims(shard="dp"))
    with raises(ValueError, "got 'up.weight' on", "which was passed as mesh"):
        shard(net, dims(shard="dp"), grid(names=("dp", "other")))
    with raises(ValueError, "got 'up.weight' placed S(0) on dimension 'tp', expected Replicate()"):
        shard(net, dims(shard="tp"))


@pytest.mark.skipif(not HAS_DIMS, reason="this torch has no dp_mesh_dims")
def test_what_is_refused() -> None:
    run_programs("trireme", 4, refused)


def without_them(rank: int) -> None:
    with raises(NotImplementedError, f"got dp_mesh_dims with torch {torch.__version__}"):
        trireme.fully_shard(Net(), mesh=grid(2, 1), dp_mesh_dims=object())


@pytest.mark.skipif(HAS_DIMS, reason="this torch has dp_mesh_dims")
def test_a_torch_without_them() -> None:
    run_programs("trireme", 2, without_them)


def placed_by_result(rank: int) -> None:
    """On the unit's own mesh; test_meshes.py has others."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    mesh = grid(names=("replicate", "shard"))

    def place_on(info: Any) -> Any:
        return lambda param: ShardPlacementResult(Shard(param.ndim - 1), info)

    own = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    model = trireme.fully_shard(Net(), mesh=mesh, shard_placement_fn=place_on(own))
    assert model.up.weight.placements == (Replicate(), Shard(1))
    model(batch(0)).sum().backward()


@pytest.mark.skipif(TORCH < (2, 12), reason="this torch has no ShardPlacementResult")
def test_placed_by_result() -> None:
    run_programs("trireme", 4, placed_by_result)
