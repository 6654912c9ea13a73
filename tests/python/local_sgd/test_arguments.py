"""What is refused, and by which name; options that differ are refused on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD
from trireme import compression as c

from harness.faults import RANKLESS_FORM, raises
from harness.models import mlp
from harness.on_ranks import on_ranks
from local_sgd.simulation import inner_optimizer, train


def given() -> tuple[nn.Module, SGD]:
    model = mlp()
    return model, SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "wrong", "name"),
    [
        ("LocalSGD", {"sync_every": 0}, "sync_every=0"),
        ("LocalSGD", {"sync_every": 1, "warmup_steps": -1}, "warmup_steps=-1"),
        ("DiLoCo", {"sync_every": -1}, "sync_every=-1"),
        ("DiLoCo", {"sync_every": 4, "fragments": 0}, "fragments=0"),
        ("DiLoCo", {"sync_every": 5, "fragments": 2}, "sync_every=5"),
        ("DiLoCo", {"sync_every": 6, "fragments": 6}, "fragments=6"),
        ("DiLoCo", {"sync_every": 4, "fragment_sync_delay": 4}, "fragment_sync_delay=4"),
        ("DiLoCo", {"sync_every": 4, "fragment_sync_delay": -1}, "fragment_sync_delay=-1"),
        ("DiLoCo", {"sync_every": 4, "fragment_update_alpha": 1.5}, "fragment_update_alpha=1.5"),
        ("DiLoCo", {"sync_every": 4, "fragment_update_alpha": float("nan")}, "alpha"),
    ],
)
def test_bad_arguments(kind: str, wrong: dict[str, Any], name: str) -> None:
    """Before `across` is looked at: there is no group at all."""
    with raises(ValueError, name, form=RANKLESS_FORM):
        getattr(trireme, kind)(*given(), **wrong)


def test_other_parameters() -> None:
    model, optimizer = given()
    other = mlp()
    with raises(ValueError, "optimizer over other parameters", form=RANKLESS_FORM):
        trireme.LocalSGD(other, optimizer, sync_every=1)
    with raises(ValueError, "outer_optimizer over other parameters", form=RANKLESS_FORM):
        trireme.DiLoCo(model, optimizer, SGD(other.parameters(), lr=1), sync_every=1)
    with raises(ValueError, "outer_optimizer without '0.bias'", form=RANKLESS_FORM):
        trireme.DiLoCo(model, optimizer, SGD([model[0].weight], lr=1), sync_every=1)
    with raises(ValueError, "2 optimizers as outer_optimizer", form=RANKLESS_FORM):
        trireme.DiLoCo(model, optimizer, [optimizer, optimizer], sync_every=1)
    with raises(ValueError, "fragments of which 0 have '2.weight'", form=RANKLESS_FORM):
        trireme.DiLoCo(model, optimizer, sync_every=2, fragments=[model[0], model[4]])
    counts = nn.ParameterList([nn.Parameter(torch.tensor([1]), requires_grad=False)])
    with raises(ValueError, "without parameters to train", form=RANKLESS_FORM):
        trireme.LocalSGD(counts, SGD(counts.parameters(), lr=1), sync_every=1)


def test_wrong_types() -> None:
    model, optimizer = given()
    with raises(TypeError, "module", form=RANKLESS_FORM):
        trireme.LocalSGD(optimizer, model, sync_every=1)
    with raises(TypeError, "as optimizer", form=RANKLESS_FORM):
        trireme.LocalSGD(model, "sgd", sync_every=1)
    with raises(TypeError, "outer_optimizer", form=RANKLESS_FORM):
        trireme.DiLoCo(model, optimizer, ["sgd"], sync_every=1)
    with raises(TypeError, "sync_every", form=RANKLESS_FORM):
        trireme.LocalSGD(model, optimizer, sync_every="often")
    with raises(TypeError, "compression", form=RANKLESS_FORM):
        trireme.LocalSGD(model, optimizer, sync_every=1, compression="int8")


def test_names_of_torch() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging import averagers

    assert trireme.PeriodicModelAverager is averagers.PeriodicModelAverager
    assert trireme.PostLocalSGDState is post_localSGD_hook.PostLocalSGDState
    assert trireme.post_localSGD_hook is post_localSGD_hook.post_localSGD_hook
    assert trireme.HierarchicalModelAverager and trireme.PostLocalSGDOptimizer


@on_ranks()
def test_across(rank: int) -> None:
    with raises(ValueError, "across=None", "one host"):
        trireme.LocalSGD(*given(), sync_every=1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("workers", "ranks"))
    with raises(ValueError, "across", "2 dimensions", form=RANKLESS_FORM):
        trireme.LocalSGD(*given(), sync_every=1, across=mesh)
    with trireme.LocalSGD(*given(), sync_every=1, across=mesh["workers"]):
        pass
    model, optimizer = given()
    ddp = trireme.DistributedDataParallel(model)
    with raises(ValueError, "across", "keeps equal"):
        trireme.LocalSGD(ddp, optimizer, sync_every=1, across=dist.group.WORLD)


@on_ranks()
def test_options_that_differ(rank: int) -> None:
    model, optimizer = given()
    with raises(ValueError, "sync_every=1", "sync_every=2", "worker 1"):
        trireme.DiLoCo(model, optimizer, sync_every=1 + rank, across=dist.group.WORLD)
    method = (None, c.Int8())[rank]
    with raises(ValueError, "compression=None", "Int8("):
        trireme.LocalSGD(
            model, optimizer, sync_every=1, across=dist.group.WORLD, compression=method
        )
    other = (nn.Linear(2, 3), nn.Linear(3, 2))[rank]
    with raises(ValueError, "[3, 2]", "[2, 3]"):
        trireme.LocalSGD(
            other, SGD(other.parameters(), lr=1), sync_every=1, across=dist.group.WORLD
        )


@on_ranks()
def test_weights(rank: int) -> None:
    with trireme.LocalSGD(*given(), sync_every=1, across=dist.group.WORLD) as rounds:
        for wrong in (-1, float("nan"), float("inf")):
            with raises(ValueError, "weight="):
                rounds.set_weight(wrong)


@on_ranks()
def test_two_blocks_over_one_model(rank: int) -> None:
    model, optimizer = given()
    first, second = (
        trireme.LocalSGD(model, optimizer, sync_every=1, across=dist.group.WORLD) for _ in range(2)
    )
    with first:
        with raises(ValueError, "'0.weight'", "other open rounds"):
            second.__enter__()
        with raises(ValueError, "open already", form=RANKLESS_FORM):
            first.__enter__()
    with second:
        optimizer.step()


@on_ranks()
def test_parameters_that_change_within_a_round(rank: int) -> None:
    """Frozen: right. Replaced, or unfrozen after it was left out: refused by name."""
    model, optimizer = mlp(), None
    model[4].requires_grad_(False)
    optimizer = inner_optimizer(model[:3])
    with trireme.LocalSGD(model, optimizer, sync_every=1, across=dist.group.WORLD):
        train(model, optimizer, 0, rank, 2)
        model[0].weight.requires_grad_(False)
        train(model, optimizer, 1, rank, 2)
    with (
        raises(ValueError, "'4.weight'", "frozen", form=RANKLESS_FORM),
        trireme.LocalSGD(model, optimizer, sync_every=1, across=dist.group.WORLD),
    ):
        model[4].requires_grad_(True)
        optimizer.step()
    dist.barrier()
