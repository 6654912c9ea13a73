"""All-reduce hooks of fully_shard: what they see, when, in which order, and what happens when one
raises; over Gloo, which gathers, and where ranks share memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import SGD

from fsdp.grid import on_grid
from fsdp.models import Skipping
from fsdp.ranks import (
    assert_locals,
    assert_parts,
    in_training,
    pair,
    rows_of,
    run_programs,
    shard_layers,
    sharded,
    step_both,
    units_of,
)
from harness.faults import raises
from harness.models import Shapes, mlp
from harness.on_ranks import BACKENDS
from harness.ranks import run_ranks
from harness.training import alone, assert_close, backward_by_rank

WORLD = 4


def gloo_groups(rank: int) -> Any:
    """Groups the ranks that share parameters, and those with the same shards."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return groups[rank // 2], groups[2 + rank % 2]


class Averaging:
    """Makes HSDP of a mesh of one dimension, and remembers what it saw: by unit, in order."""

    def __init__(self, model: nn.Module, replicas: dist.ProcessGroup) -> None:
        self.seen: list[tuple[int, torch.Tensor]] = []
        self.replicas = replicas
        for number, unit in enumerate(units_of(model)):
            unit.set_all_reduce_hook(self.hook_of(number))

    def hook_of(self, number: int) -> Callable[[torch.Tensor], None]:
        def hook(row: torch.Tensor) -> None:
            assert not torch.is_grad_enabled()
            self.seen.append((number, row.clone()))
            dist.all_reduce(row, group=self.replicas)
            row.div_(2)

        return hook

    def take(self) -> list[tuple[int, torch.Tensor]]:
        seen, self.seen = self.seen, []
        return seen


def as_torch(rank: int, mesh: DeviceMesh) -> None:
    """Rows are the same but for the order of parameters in them; so are gradients."""
    shards, replicas = gloo_groups(rank)
    theirs_mesh = DeviceMesh.from_group(shards, "cpu")
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        tolerance: dict[str, Any] = {"rtol": 2**-7, "atol": 1e-3} if policy.param_dtype else {}
        ours = in_training(shard_layers(mlp(), mesh=mesh["shard"], mp_policy=policy), SGD, lr=0.1)
        model = shard_layers(mlp(), torch_fully_shard, mesh=theirs_mesh, mp_policy=policy)
        theirs = in_training(model, SGD, lr=0.1)
        both = [(side, Averaging(side.model, replicas)) for side in (ours, theirs)]
        for step in range(3):
            rows: list[dict[int, torch.Tensor]] = []
            for training, averaging in both:
                training.optimizer.zero_grad()
                training.model(rows_of(step, training)).float().square().mean().backward()
                seen = averaging.take()
                rows.append(dict(seen))
                assert len(seen) == len(rows[-1]) == 3
            for number, row in rows[0].items():
                assert row.dtype == torch.float32 and row.ndim == 1
                got, expected = row.sort().values, rows[1][number].sort().values
                assert_close(f"unit {number}", got, expected, **tolerance)
            assert_locals(ours.model, theirs.model, **tolerance)
            for training, _ in both:
                training.optimizer.step()


def as_one_process(rank: int, mesh: DeviceMesh) -> None:
    """Four dtypes, a scalar, no elements, ranks that have nothing: rows of one length."""
    _, replicas = gloo_groups(rank)
    ours, one = pair(Shapes, options={"mesh": mesh["shard"]})
    averaging = Averaging(ours.model, replicas)
    for step in range(3):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
        calls = [(number, row.dtype, row.numel()) for number, row in averaging.take()]
        assert len(calls) == len(set(calls)) == 5  # the outermost unit has two dtypes
        assert_same_everywhere(calls)
        step_both(ours, one)


def skipped_units(rank: int, mesh: DeviceMesh) -> None:
    """Calls are the same on all ranks, whatever each uses; what nobody uses has no .grad."""
    _, replicas = gloo_groups(rank)
    ours, one = pair(Skipping, options={"mesh": mesh["shard"]})
    averaging = Averaging(ours.model, replicas)
    ways_of_steps = (("abc",) * 4, ("ab", "bc", "ca", "s"), ("a", "ab", "b", "ba"), ("c",) * 4)
    for step, ways in enumerate(ways_of_steps):
        for training in (ours, one):
            training.optimizer.zero_grad()
        backward_by_rank(ours, one, step, ways)
        # Gradients that only one of both replicas uses are those of no one process.
        if step != 1:
            step_both(ours, one)
        assert_same_everywhere([(number, row.numel()) for number, row in averaging.take()])


def assert_same_everywhere(calls: list[Any]) -> None:
    of_all: list[Any] = [None] * WORLD
    dist.all_gather_object(of_all, calls)
    assert calls and all(other == calls for other in of_all), of_all


def own_half(whole: Any) -> torch.Tensor:
    """What this rank has of it, by torch.chunk's rule."""
    half = -(-whole.shape[0] // 2)
    return whole[:half] if dist.get_rank() % 2 == 0 else whole[half:]


@BACKENDS
def test_a_hook_makes_hsdp_of_a_mesh_of_one_dimension(backend: str) -> None:
    on_grid(backend, as_torch, as_one_process, skipped_units)


def after_the_all_reduce(rank: int, mesh: DeviceMesh) -> None:
    """Under HSDP rows are averages over all ranks; deferred backwards show nothing."""
    ours = in_training(shard_layers(mlp(), mesh=mesh), SGD, lr=0.1)
    rows: list[torch.Tensor] = []
    ours.model[0].set_all_reduce_hook(lambda row: rows.append(row.clone()))
    ours.model.set_requires_all_reduce(False)
    ours.backward(0)
    assert not rows
    ours.model.set_requires_all_reduce(True)
    ours.backward(1)
    one = alone(mlp, SGD, lr=0.1)
    one.backward(0, 1)
    parts = [own_half(param.grad) for param in one.model[0].parameters()]
    (row,) = rows
    expected = torch.cat([part.flatten() for part in parts])
    assert_close("row", row.sort().values, pad(expected, row.numel()).sort().values)
    with raises(ValueError, "got a stream for the all-reduce hook on a mesh of 2 dimensions"):
        ours.model.set_all_reduce_hook(lambda row: None, stream=object())


def pad(row: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.cat([row, row.new_zeros(numel - row.numel())])


@BACKENDS
def test_under_hsdp(backend: str) -> None:
    on_grid(backend, after_the_all_reduce)


def accumulation(rank: int) -> None:
    """A hook is called once per backward that averages, on what is new; not of held units. With a
    factor it sees what .grad gets."""
    ours, one = pair(mlp)
    model = ours.model
    calls: list[float] = []

    def doubled(row: torch.Tensor) -> None:
        calls.append(row.numel())
        row.mul_(2)

    for unit in units_of(model):
        unit.set_all_reduce_hook(doubled)
    ours.backward(0, 1, sync=False)
    assert not calls
    ours.backward(2)
    assert len(calls) == 3
    ours.backward(3)
    assert len(calls) == 6
    one.backward(0, 1, 2, 3)
    scale_gradients(one.model, 2)
    assert_parts(ours, one, grads=True)

    for training in (ours, one):
        training.optimizer.zero_grad()
    calls.clear()
    model[2].set_requires_gradient_sync(False)
    ours.loss(4).backward()
    assert len(calls) == 2 and model[2].weight.grad is None
    model[2].set_requires_gradient_sync(True)
    model[0].set_gradient_divide_factor(1.0)
    seen: list[torch.Tensor] = []
    model[0].set_all_reduce_hook(lambda row: seen.append(row.clone()))
    ours.loss(5).backward()
    one.optimizer.zero_grad()
    one.backward(5)
    averages = [own_half(param.grad).sum() for param in one.model[0].parameters()]
    assert_close("row", seen[0].sum(), 2 * sum(averages))


def scale_gradients(model: nn.Module, factor: float) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(factor)


def manual_finalization(rank: int) -> None:
    ours, one = pair(mlp)
    calls: list[int] = []
    for unit in units_of(ours.model):
        unit.set_all_reduce_hook(lambda row: calls.append(row.numel()))
    ours.model.set_manual_backward_finalization(True)
    for number in (0, 1):
        ours.loss(number).backward()
    assert not calls
    ours.model.finalize_backward()
    assert len(calls) == 3
    one.backward(0, 1)
    step_both(ours, one)


def uneven_inputs(rank: int) -> None:
    """A rank that has joined calls hooks, too, which may wait for all."""
    ours, group = sharded(mlp), dist.new_group(backend="gloo")
    calls: list[int] = []

    def count(row: torch.Tensor) -> None:
        ranks = torch.ones(1)
        dist.all_reduce(ranks, group=group)
        calls.append(int(ranks))

    ours.model[2].set_all_reduce_hook(count)
    with Join([ours.model], optimizer=ours.optimizer):
        for number in range(3 - 2 * rank):
            ours.train(number)
    assert calls == [2, 2, 2]


def in_a_stream(rank: int) -> None:
    """CPUs have one; what comes out is what the hook has left."""
    ours, one = pair(mlp)
    stream = torch.cpu.Stream()
    for unit in units_of(ours.model):
        unit.set_all_reduce_hook(lambda row: row.mul_(3), stream=stream)
    for training in (ours, one):
        training.backward(0)
    scale_gradients(one.model, 3)
    step_both(ours, one)


def taken_back(rank: int) -> None:
    """None is no hook; a hook that holds its model keeps nothing alive."""
    ours, one = pair(mlp)
    for hook in (lambda row: row.zero_(), None):
        ours.model[0].set_all_reduce_hook(hook)
    for training in (ours, one):
        training.backward(0)
    step_both(ours, one)
    with raises(TypeError, "got int as all-reduce hook"):
        ours.model.set_all_reduce_hook(3)
    last = hold_itself(rows_of(0, ours))
    gc.collect()
    assert last() is None


def hold_itself(x: torch.Tensor) -> Any:
    """A model whose hook holds it, and which was used."""
    model = shard_layers(mlp())
    model[0].set_all_reduce_hook(lambda row: model.zero_grad())
    model(x).sum().backward()
    return weakref.ref(model)


@BACKENDS
def test_when_hooks_are_called(backend: str) -> None:
    run_programs(
        backend, 2, accumulation, manual_finalization, uneven_inputs, in_a_stream, taken_back
    )


def survive(rank: int, backend: str) -> None:
    dist.init_process_group(backend)
    ours = sharded(mlp)
    ours.train(0)
    is_broken = True

    def hook(row: torch.Tensor) -> None:
        if rank == 1 and is_broken:
            raise ArithmeticError("the hook of this rank is broken")

    ours.model[2].set_all_reduce_hook(hook)
    if rank == 1:
        loss = ours.loss(1)
        with pytest.raises(ArithmeticError, match="the hook of this rank"):
            loss.backward()
    else:
        reason = "an all-reduce hook raised: ArithmeticError: the hook of this rank is broken"
        with raises(dist.DistBackendError, reason, "(rank 1 of 2)"):
            ours.train(1)
            ours.loss(2)
    if backend == "gloo":
        return
    is_broken = False
    ours.model.reset_iter_state()
    ours.optimizer.zero_grad()
    ours.backward(3)
    grads = [param.grad.full_tensor() for param in ours.model.parameters()]
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


@BACKENDS
def test_a_hook_that_raises_on_one_rank(backend: str) -> None:
    run_ranks(survive, 2, backend, timeout=40, fresh=True)
