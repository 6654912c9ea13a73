"""Units under one root that are sharded over different ranks: experts, of which each pair of ranks
has one, inside a model that all four share; over Gloo, which gathers, and where ranks share memory.

The oracles are torch's FSDP2 over Gloo, and one process on the whole batch.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp.model_parallel import grid, sgd
from fsdp.ranks import FullyShard, assert_locals, run_programs, units_of
from harness.faults import raises
from harness.on_ranks import BACKENDS
from harness.training import assert_close

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
NAMES = ("share", "expert")  # a row of the grid has all experts, a column shares one of them
has_results = pytest.mark.skipif(TORCH < (2, 12), reason="this torch has no ShardPlacementResult")


class Experts(nn.Module):
    """One matrix for each; where they are distributed, this rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6, 6) / 3)
        self.scale = nn.Parameter(torch.ones(2, 6))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        weight, scale = (
            tensor.to_local()[0] if isinstance(tensor, DTensor) else tensor[which % len(tensor)]
            for tensor in (self.weight, self.scale)
        )
        return (x @ weight).tanh() * scale


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(5, 6)
        self.experts = Experts()
        self.norm = nn.LayerNorm(6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, which: int, *, routes: bool = True) -> torch.Tensor:
        hidden = self.inner(x)
        if routes:
            hidden = hidden + self.experts(hidden, which)
        return self.outer(self.norm(hidden))


def distributed(mesh: DeviceMesh) -> Mixture:
    """Each rank of a row has one of the experts."""
    model = Mixture()
    for name, param in list(model.experts.named_parameters()):
        mine = nn.Parameter(distribute_tensor(param.detach(), mesh["expert"], [Shard(0)]))
        setattr(model.experts, name, mine)
    return model


def last(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def in_units(shard: FullyShard, mesh: DeviceMesh, whole: DeviceMesh, **options: Any) -> Any:
    model: Any = distributed(mesh)
    shard(model.experts, mesh=mesh["share"], shard_placement_fn=last, **options)
    shard(model.inner, mesh=whole, **options)
    return shard(model, mesh=whole, **options)


def in_one_unit(shard: FullyShard, mesh: DeviceMesh, whole: DeviceMesh, **options: Any) -> Any:
    """Parameters of one unit on two meshes."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    model: Any = distributed(mesh)
    of_experts = FSDPMeshInfo(mesh["share"], shard_mesh_dim=0)
    experts = set(model.experts.parameters())

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(last(param), of_experts) if param in experts else None

    return shard(model, mesh=whole, shard_placement_fn=place, **options)


def meshes(backend: str | None = None) -> tuple[DeviceMesh, DeviceMesh]:
    group = dist.new_group(backend=backend) if backend else dist.group.WORLD
    assert group is not None
    return grid(2, 2, names=NAMES, backend=backend), DeviceMesh.from_group(group, "cpu")


def rows(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(8, 5, generator=generator)


def own_loss(model: nn.Module, step: int, rank: int, *, routes: bool = True) -> torch.Tensor:
    loss: torch.Tensor = model(rows(step)[rank::4], rank % 2, routes=routes).float().square().mean()
    return loss


def accumulate(model: Any, steps: tuple[int, ...]) -> None:
    for step in steps:
        model.set_requires_gradient_sync(step == steps[-1])
        own_loss(model, step, dist.get_rank()).backward()


def compare_with_torchs(build: Any, **options: Any) -> None:
    pairs = []
    for shard, backend in ((trireme.fully_shard, None), (torch_fully_shard, "gloo")):
        model = build(shard, *meshes(backend), **options)
        pairs.append((model, sgd(model)))
    (ours, _), (theirs, _) = pairs
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.placements == other.placements and one.shape == other.shape
    for steps in ((0,), (1, 2), (3,)):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            accumulate(model, steps)
        assert_locals(ours, theirs)
        for _, optimizer in pairs:
            optimizer.step()
        assert_locals(ours, theirs)
        with torch.no_grad():
            own_loss(ours, 9, dist.get_rank())


def as_torch(rank: int) -> None:
    compare_with_torchs(in_units)
    compare_with_torchs(in_units, reshard_after_forward=False)
    cast = MixedPrecisionPolicy(torch.float64, torch.float64)
    compare_with_torchs(in_units, mp_policy=cast)


def as_torch_in_one_unit(rank: int) -> None:
    compare_with_torchs(in_one_unit)
    compare_with_torchs(in_one_unit, reshard_after_forward=False)


def whole(tensor: Any) -> torch.Tensor | None:
    return None if tensor is None else tensor.full_tensor()


def assert_whole(ours: nn.Module, one: nn.Module, *, grads: bool = False) -> None:
    for (name, got), expected in zip(ours.named_parameters(), one.parameters(), strict=True):
        if grads:
            assert_close(f"{name}.grad", whole(got.grad), expected.grad)
        else:
            assert_close(name, whole(got), expected.detach())


def step_whole(ours: Any, one: nn.Module, optimizers: Any, routes: Any, step: int) -> None:
    """``routes``: whether each rank uses its expert."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    own_loss(ours, step, dist.get_rank(), routes=routes[dist.get_rank()]).backward()
    losses = [own_loss(one, step, rank, routes=routes[rank]) for rank in range(4)]
    (torch.stack(losses).sum() / 4).backward()
    assert_whole(ours, one, grads=True)
    norm = trireme.clip_grad_norm_(ours.parameters(), 0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 0.1))
    for optimizer in optimizers:
        optimizer.step()
    assert_whole(ours, one)


def as_one_process(rank: int) -> None:
    """Also where ranks leave their experts out, and come to the gradients in different orders."""
    for build in (in_units, in_one_unit)[: 1 if TORCH < (2, 12) else 2]:
        for dynamic in (False, True):
            ours, one = build(trireme.fully_shard, *meshes()), Mixture()
            if build is in_units:
                ours.experts.set_gradient_divide_factor(4)
                ours.set_dynamic_gather(dynamic)
            optimizers = sgd(ours), sgd(one)
            every = [(True,) * 4, (True, False, True, True), (False, False, True, True)]
            for step, routes in enumerate((*every, every[0])):
                if build is in_units:
                    step_whole(ours, one, optimizers, routes, step)
                else:  # all parameters of the unit have one divide factor
                    own_loss(ours, step, rank, routes=routes[rank]).backward()


def with_replicas(rank: int) -> None:
    """The model on two replicas of two shards, experts shared along another dimension."""
    mesh, _ = meshes()
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, one = in_units(trireme.fully_shard, mesh, hybrid), Mixture()
    ours.experts.set_gradient_divide_factor(4)
    optimizers = sgd(ours), sgd(one)
    for step in range(2):
        step_whole(ours, one, optimizers, (True, step == 0, True, True), step)


def norms(rank: int) -> None:
    """Norms are the same on all ranks, where one expert is used by nobody; and where experts are no
    DTensors, so that each rank only knows of its own."""
    mesh, everyone = meshes()
    plain: Any = Mixture()
    for name, param in list(plain.experts.named_parameters()):
        setattr(plain.experts, name, nn.Parameter(param.detach()[rank % 2][None].clone()))
    trireme.fully_shard(plain.experts, mesh=mesh["share"], shard_placement_fn=last)
    trireme.fully_shard(plain, mesh=everyone)
    for ours in (in_units(trireme.fully_shard, mesh, everyone), plain):
        ours.experts.set_gradient_divide_factor(4)
        for routes in ((True,) * 4, (True, False, True, False)):
            one = Mixture()
            own_loss(ours, 0, rank, routes=routes[rank]).backward()
            losses = [own_loss(one, 0, other, routes=routes[other]) for other in range(4)]
            (torch.stack(losses).sum() / 4).backward()
            for norm_type in (2.0, math.inf):
                norm = trireme.clip_grad_norm_(ours.parameters(), 100.0, norm_type)
                expected = nn.utils.clip_grad_norm_(one.parameters(), 100.0, norm_type)
                torch.testing.assert_close(norm, expected)
            ours.zero_grad()


def settings(rank: int) -> None:
    """What is said of a unit holds; copies, evaluation, and stepping in backward work."""
    ours, one = in_units(trireme.fully_shard, *meshes()), Mixture()
    ours.experts.set_gradient_divide_factor(4)
    ours.inner.set_modules_to_forward_prefetch([ours.experts, ours])
    twin = copy.deepcopy(ours)
    for model in (ours, twin):
        alone = copy.deepcopy(one)
        step_whole(model, alone, (sgd(model), sgd(alone)), (True,) * 4, 0)
    ours.unshard()
    ours.experts.unshard()
    assert isinstance(ours.norm.weight, nn.Parameter) and not isinstance(ours.norm.weight, DTensor)
    assert ours.experts.weight.device_mesh.mesh_dim_names == ("expert",)
    for unit in units_of(ours):
        unit.reshard()
    stepped: list[str] = []
    for name, param in ours.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: stepped.append(name))
    own_loss(ours, 1, rank).backward()
    assert sorted(stepped) == sorted(name for name, _ in one.named_parameters())
    assert ours.last_step()["buckets"] >= 2


def refused(rank: int) -> None:
    mesh, everyone = meshes()
    model: Any = distributed(mesh)
    trireme.fully_shard(model.experts, mesh=mesh["share"], shard_placement_fn=last)
    trireme.fully_shard(model.inner, mesh=everyone)
    trireme.fully_shard(model, mesh=mesh["share"])
    with raises(ValueError, "got a unit of FSDPLinear on ranks [0, 1, 2, 3] of cpu", "all ranks"):
        model(rows(0), 0)
    ours = in_units(trireme.fully_shard, mesh, everyone)
    with raises(ValueError, "got Join of a model with units on 2 meshes"):
        Join([ours], optimizer=sgd(ours))


def refused_in_one_unit(rank: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, ShardPlacementResult

    mesh, everyone = meshes()
    ours = in_one_unit(trireme.fully_shard, mesh, everyone)
    with raises(ValueError, "got set_all_reduce_hook() for a unit with parameters on 2 meshes"):
        ours.set_all_reduce_hook(lambda _: None)
    with raises(ValueError, "got set_custom_all_gather() for a unit"):
        ours.set_custom_all_gather(None)
    info = DDPMeshInfo(mesh["share"], replicate_mesh_dim=0)
    with raises(ValueError, "got a placement of 'weight' by", "FSDPMeshInfo"):
        trireme.fully_shard(
            nn.Linear(4, 4),
            mesh=everyone,
            shard_placement_fn=lambda _: ShardPlacementResult(None, info),
        )


PROGRAMS = (as_torch, as_one_process, with_replicas, norms, settings, refused)


@BACKENDS
def test_units_on_two_meshes(backend: str) -> None:
    run_programs(backend, 4, *PROGRAMS)


@has_results
@BACKENDS
def test_a_unit_on_two_meshes(backend: str) -> None:
    run_programs(backend, 4, as_torch_in_one_unit, refused_in_one_unit)
