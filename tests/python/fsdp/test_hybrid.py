"""HSDP: on a mesh of two dimensions parameters are sharded along the second, and the same along the
first; over Gloo, which gathers, and where ranks share memory.
"""

from __future__ import annotations

import os
import signal
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trireme
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from fsdp.grid import NAMES, WORLD, gloo_grid, grid, on_grid
from fsdp.models import Skipping
from fsdp.ranks import (
    assert_locals,
    error_of_training,
    in_training,
    pair,
    rows_of,
    shard_layers,
    sharded,
    step_both,
    train_both,
    train_by_rank,
)
from harness.faults import HOUSE_FORM
from harness.models import Shapes, Tied, mlp
from harness.on_ranks import BACKENDS
from harness.ranks import run_ranks
from harness.training import alone, assert_close, backward_by_rank


def as_one_process(rank: int, mesh: DeviceMesh) -> None:
    """Uneven rows, a scalar, no elements, four dtypes, tied ones; dimension 1; kept unsharded."""
    along_last: dict[str, Any] = {"shard_placement_fn": lambda param: Shard(max(param.ndim - 1, 0))}
    kept = {"reshard_after_forward": False}
    for make, options in ((Shapes, {}), (Tied, kept), (mlp, {}), (mlp, along_last)):
        ours, one = pair(make, options={"mesh": mesh, **options})
        for step in range(3):
            train_both(ours, one, step)
            with torch.no_grad():
                ours.loss(9)


def as_torch(rank: int, mesh: DeviceMesh) -> None:
    """Gradients, norms, placements and state of the optimizer; in bf16, too."""
    rounded = {"rtol": 2**-7, "atol": 1e-3}
    theirs_mesh = gloo_grid(rank)
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        tolerance: dict[str, Any] = rounded if policy.param_dtype else {}
        ours = in_training(shard_layers(mlp(), mesh=mesh, mp_policy=policy), SGD, lr=0.1)
        model = shard_layers(mlp(), torch_fully_shard, mesh=theirs_mesh, mp_policy=policy)
        theirs = in_training(model, SGD, lr=0.1)
        for step in range(3):
            norms: list[Any] = []
            for training in (ours, theirs):
                training.optimizer.zero_grad()
                training.model(rows_of(step, training)).float().square().mean().backward()
                norms.append(clip_grad_norm_(training.model.parameters(), 0.05).full_tensor())
            torch.testing.assert_close(*norms, **tolerance)
            assert_locals(ours.model, theirs.model, **tolerance)
            for training in (ours, theirs):
                training.optimizer.step()
        for got, expected in zip(ours.model.parameters(), model.parameters(), strict=True):
            assert got.placements == expected.placements == (Replicate(), Shard(0))
            assert got.device_mesh.mesh_dim_names == NAMES


def clipped_by_trireme(rank: int, mesh: DeviceMesh) -> None:
    ours, one = pair(mlp, options={"mesh": mesh})
    for step in range(2):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
        norm = trireme.clip_grad_norm_(ours.model.parameters(), 0.05)
        torch.testing.assert_close(norm, clip_grad_norm_(one.model.parameters(), 0.05))
        step_both(ours, one)


@BACKENDS
def test_training(backend: str) -> None:
    on_grid(backend, as_one_process, as_torch, clipped_by_trireme)


def accumulation(rank: int, mesh: DeviceMesh) -> None:
    """Without averaging at all."""
    ours, one = pair(mlp, options={"mesh": mesh})
    for step in range(3):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(3 * step, 3 * step + 1, sync=False)
            if training is ours:
                assert all(param.grad is None for param in ours.model.parameters())
            training.backward(3 * step + 2)
        step_both(ours, one)


# Says of each backward of a step whether it scatters, and the layers that do not all-reduce.
PARTS: tuple[tuple[tuple[bool, tuple[int, ...]], ...], ...] = (
    ((True, (0, 2, 4)), (True, (0, 2, 4)), (True, ())),
    ((True, (2,)), (True, (0, 2)), (True, ())),
    ((False, ()), (True, (0, 2, 4)), (False, (0, 2, 4)), (True, (4,)), (True, ())),
)


def partial_sums_as_torch(rank: int, mesh: DeviceMesh) -> None:
    """Sums wait for the replicas: of all units, of some, between backwards that accumulate only."""
    theirs_mesh = gloo_grid(rank)
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        tolerance: dict[str, Any] = {"rtol": 2**-7, "atol": 1e-3} if policy.param_dtype else {}
        ours = in_training(shard_layers(mlp(), mesh=mesh, mp_policy=policy), SGD, lr=0.1)
        model = shard_layers(mlp(), torch_fully_shard, mesh=theirs_mesh, mp_policy=policy)
        theirs = in_training(model, SGD, lr=0.1)
        for step, parts in enumerate(PARTS):
            for training in (ours, theirs):
                training.optimizer.zero_grad()
            for number, (scatters, deferred) in enumerate(parts):
                for training in (ours, theirs):
                    training.model.set_requires_gradient_sync(scatters)
                    for layer in (0, 2, 4):
                        training.model[layer].set_requires_all_reduce(layer not in deferred)
                    x = rows_of(10 * step + number, training)
                    training.model(x).float().square().mean().backward()
                assert_locals(ours.model, theirs.model, **tolerance)
            for training in (ours, theirs):
                training.optimizer.step()


def partial_sums_of_what_is_used(rank: int, mesh: DeviceMesh) -> None:
    """Units that only the backwards before use, on some of the ranks; what nobody uses has no
    .grad; reset_iter_state() forgets."""
    ours, one = pair(Skipping, options={"mesh": mesh})
    ours.model.set_dynamic_gather(True)
    steps = (("a", "b", "ab", "b"), ("c", "s", "c", "c")), (("a", "a", "s", "s"), ("s",) * 4)
    for step, backwards in enumerate(steps):
        for training in (ours, one):
            training.optimizer.zero_grad()
        for number, ways in enumerate(backwards):
            ours.model.set_requires_all_reduce(number == len(backwards) - 1)
            backward_by_rank(ours, one, 10 * step + number, ways)
        step_both(ours, one)
    for training in (ours, one):
        training.optimizer.zero_grad()
    ours.model.set_requires_all_reduce(False)
    ours.model(rows_of(7, ours), "abc").square().mean().backward()
    ours.model.reset_iter_state()
    ours.model.set_requires_all_reduce(True)
    for training in (ours, one):
        training.model(rows_of(8, training), "abc").square().mean().backward()
    step_both(ours, one)


@BACKENDS
def test_partial_sums(backend: str) -> None:
    on_grid(backend, partial_sums_as_torch, partial_sums_of_what_is_used)


def unused_parameters(rank: int, mesh: DeviceMesh) -> None:
    """Units that ranks of one replica skip, or all of a replica."""
    ours, one = pair(Skipping, options={"mesh": mesh})
    for step, ways in enumerate((("abc",) * 4, ("a", "b", "c", "s"), ("ab", "ab", "c", "c"))):
        train_by_rank(ours, one, step, ways)


@BACKENDS
def test_accumulation_and_unused_parameters(backend: str) -> None:
    on_grid(backend, accumulation, unused_parameters)


def states(rank: int, mesh: DeviceMesh) -> None:
    """Whole ones are those of one process; saved by torch's DCP and loaded they train on alike."""

    def training(seed_step: int) -> Any:
        ours = in_training(shard_layers(mlp(), mesh=mesh), AdamW, lr=0.1)
        ours.train(seed_step)
        return ours

    def parts(of: Any) -> dict[str, Any]:
        model, optimizer = get_state_dict(of.model, of.optimizer)
        return {"model": model, "optimizer": optimizer}

    ours, one = training(0), alone(mlp, AdamW, lr=0.1)
    one.train(0)
    whole = get_model_state_dict(ours.model, options=StateDictOptions(full_state_dict=True))
    for name, value in one.model.state_dict().items():
        shown = ours.model.state_dict()[name]
        assert shown.placements == (Replicate(), Shard(0))
        assert_close(name, whole[name], value)
        assert_close(name, shown.full_tensor(), value)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(parts(ours), checkpoint_id=folder[0])
    other = training(3)
    state = parts(other)
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(
        other.model,
        other.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    ours.train(4)
    other.train(4)
    for mine, again in zip(ours.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), again.to_local())


@BACKENDS
def test_states(backend: str) -> None:
    on_grid(backend, states)


def survive(rank: int, backend: str) -> str | None:
    dist.init_process_group(backend)
    ours = sharded(mlp, SGD, shard_layers, {"mesh": grid()})
    ours.train(0)
    if rank == 3:
        ours.model[2].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return error_of_training(ours)


@BACKENDS
def test_a_rank_is_killed(backend: str) -> None:
    """Those with which it shares parameters, and those that have the same."""
    texts = run_ranks(survive, WORLD, backend, timeout=40, dying=(3,))
    for text in texts[:3]:
        assert text is not None and HOUSE_FORM.match(text), texts
