"""fully_shard of parameters that tensor parallelism has cut already: over Gloo, which gathers, and
where ranks share memory, on two ranks of data times two of the model.

The oracles are torch's FSDP2 over Gloo on the same mesh, and one process on the whole batch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from fsdp.model_parallel import (
    Language,
    assert_like_torchs,
    assert_parts,
    backward,
    build,
    build_torchs,
    grid,
    loss_of,
    own_words,
    sgd,
    words,
)
from fsdp.ranks import assert_locals, gloo_mesh, run_programs
from harness.faults import raises
from harness.on_ranks import BACKENDS
from harness.ranks import run_ranks
from harness.training import assert_close
from shm.ranks import TORCH

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "python" / "fsdp_tp.py"
# Values are rounded to 8 bits, and summed up in another order.
BF16 = {"rtol": 2**-6, "atol": 2e-3}


def as_torch(rank: int) -> None:
    """Placements, gradients with and without accumulation, parameters; kept unsharded; in bf16;
    gradients in a dtype of their own; whole ones where torch can put them together."""
    mesh = grid()
    cast = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    cases: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({}, {}),
        ({"reshard_after_forward": False, "shard_placement_fn": last_of_up}, {}),
        ({"mp_policy": cast}, BF16),
    ]
    if TORCH >= (2, 15):
        cases.append(({"shard_placement_fn": in_fp64}, {}))
    for options, tolerance in cases:
        pairs = [
            (model, sgd(model)) for model in (build(mesh, **options), build_torchs(mesh, **options))
        ]
        (ours, _), (theirs, _) = pairs
        assert_like_torchs(ours, theirs)
        for numbers in ((0,), (1, 2), (3,)):
            for model, optimizer in pairs:
                optimizer.zero_grad()
                backward(model, mesh, *numbers)
            norms = [clip_grad_norm_(on_two_dims(model), 0.5).full_tensor() for model, _ in pairs]
            torch.testing.assert_close(*norms, **tolerance)
            assert_locals(ours, theirs, **tolerance)
            for _, optimizer in pairs:
                optimizer.step()
            assert_locals(ours, theirs, **tolerance)
            with torch.no_grad():
                loss_of(ours, own_words(9, mesh))
            ours.reshard()
        for name in ("block.down.weight", "norm.weight"):
            whole = [model.get_parameter(name).full_tensor() for model in (ours, theirs)]
            assert_close(name, *whole, **tolerance)


def on_two_dims(model: nn.Module) -> list[nn.Parameter]:
    """torch's function takes no others together with them."""
    return [param for name, param in model.named_parameters() if name != "scale"]


def last_of_up(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.shape == (14, 8) else None


def in_fp64(param: nn.Parameter) -> None:
    param.grad_dtype = torch.float64


def clip_and_step(ours: Any, one: Any, optimizers: Sequence[Any]) -> None:
    """Both, alike: before, by what norm, and afterwards."""
    assert_parts(ours, one, grads=True)
    norm = trireme.clip_grad_norm_(ours.parameters(), 0.05)
    torch.testing.assert_close(norm, clip_grad_norm_(one.parameters(), 0.05))
    for optimizer in optimizers:
        optimizer.step()
    assert_parts(ours, one)


def as_one_process(rank: int) -> None:
    mesh = grid()
    for options in ({}, {"shard_placement_fn": lambda param: Shard(param.ndim - 1)}):
        ours, one = build(mesh, **options), Language()
        optimizers = sgd(ours), sgd(one)
        for numbers in ((0,), (1, 2)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(ours, mesh, *numbers)
            for number in numbers:
                loss_of(one, words(number)).backward()
            clip_and_step(ours, one, optimizers)


def placed(rank: int) -> None:
    """What torch makes of it, spelled out; what the module shows unsharded."""
    mesh = grid()
    model = build(mesh)
    assert model.block.up.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert model.block.down.weight.placements == (Shard(0), Shard(1))
    assert model.norm.weight.placements == (Shard(0), Replicate())
    assert model.scale.placements == (Shard(0),) and model.scale.device_mesh == mesh["dp"]
    seen: list[Any] = []
    model.block.up.register_forward_pre_hook(lambda up, _: seen.append(up.weight))
    loss_of(model, own_words(0, mesh)).backward()
    (shown,) = seen
    assert isinstance(shown, nn.Parameter) and isinstance(shown, DTensor) and shown.is_leaf
    assert shown.device_mesh == mesh["tp"] and shown.placements == (Shard(0),)
    assert shown.shape == (14, 8) and shown.requires_grad and shown.grad is None


@BACKENDS
def test_training(backend: str) -> None:
    run_programs(backend, 4, as_torch, as_one_process, placed)


def frozen_and_unfrozen(rank: int) -> None:
    """Freezes the sharded parameter, and the one that a module shows while it is unsharded."""
    mesh = grid()
    pairs = [(model, sgd(model)) for model in (build(mesh), build_torchs(mesh))]
    (ours, _), (theirs, _) = pairs
    for step, frozen in enumerate((("block.up.weight", "norm.weight"), (), ("head.bias",))):
        for model, optimizer in pairs:
            for name, param in model.named_parameters():
                param.requires_grad_(name not in frozen)
            optimizer.zero_grad()
            backward(model, mesh, step)
            assert all(model.get_parameter(name).grad is None for name in frozen)
        assert_locals(ours, theirs)
        for _, optimizer in pairs:
            optimizer.step()
        assert_locals(ours, theirs)
    ours.unshard()
    ours.norm.weight.requires_grad_(False)
    ours.reshard()
    backward(ours, mesh, 5)
    assert not ours.norm.weight.requires_grad


class Recomputed(Language):
    def forward(self, words: torch.Tensor) -> Any:
        hidden = checkpoint(self.block, self.embed(words), use_reentrant=False)
        return self.head(self.norm(hidden)) * self.scale


def recomputed(rank: int) -> None:
    mesh = grid()
    ours, one = build(mesh, make=Recomputed), Language()
    for step in range(2):
        backward(ours, mesh, step)
        loss_of(one, words(step)).backward()
        assert_parts(ours, one, grads=True)


def kept_graphs(rank: int) -> None:
    """A second backward of a graph adds up; of one that is older than a step it raises."""
    mesh = grid()
    ours, one = build(mesh), Language()
    optimizer = sgd(ours)
    for model, rows in ((ours, own_words(0, mesh)), (one, words(0))):
        loss = loss_of(model, rows)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        if model is ours:
            kept = loss
    assert_parts(ours, one, grads=True)
    optimizer.step()
    loss_of(ours, own_words(1, mesh))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@BACKENDS
def test_graphs_and_flags(backend: str) -> None:
    run_programs(backend, 4, frozen_and_unfrozen, recomputed, kept_graphs)


class Passing(nn.Module):
    """Units that take and return DTensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.inner: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> Any:
        self.inner["first"] = self.first(x)
        self.inner["second"] = self.second(self.inner["first"].tanh())
        out = self.inner["second"]
        return out.full_tensor() if isinstance(out, DTensor) else out


def dtensors_between_units(rank: int) -> None:
    """Hooks on what units return fire, and so each is unsharded again for its backward."""
    mesh, one = grid(), Passing()
    on_mesh = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    second = ColwiseParallel(input_layouts=Shard(-1), use_local_output=False)
    ours = parallelize_module(Passing(), mesh["tp"], {"first": on_mesh, "second": second})
    for unit in (ours.first, ours.second, ours):
        trireme.fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=True)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    shown: list[bool] = []

    def on_model_mesh(name: str) -> bool:
        return bool(ours.get_submodule(name).weight.device_mesh == mesh["tp"])

    for step in range(2):
        for model, rows in ((ours, batch[rank // 2 :: 2]), (one, batch)):
            out = model(rows)
            if model is ours:
                assert all(isinstance(inner, DTensor) for inner in ours.inner.values())
                for name, inner in ours.inner.items():
                    assert ours.get_submodule(name).weight.device_mesh == mesh
                    inner.register_hook(lambda _, name=name: shown.append(on_model_mesh(name)))
            out.square().mean().backward()
        assert shown == [True] * 2 * (step + 1)
        assert_parts(ours, one, grads=True)
    ours.inner.clear()  # a graph whose hooks hold the model


def parallel_loss(rank: int) -> None:
    """The outermost unit returns a DTensor, of which no rank ever has all."""
    mesh, one = grid(), Passing()
    plan = {"second": ColwiseParallel(use_local_output=False)}
    ours = parallelize_module(Passing(), mesh["tp"], plan)
    ours.forward = lambda x: ours.second(ours.first(x).tanh())
    for unit in (ours.first, ours):
        trireme.fully_shard(unit, mesh=mesh["dp"])
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    classes = torch.arange(4)
    for _ in range(2):
        with loss_parallel():
            nn.functional.cross_entropy(
                ours(batch[rank // 2 :: 2]), classes[rank // 2 :: 2]
            ).backward()
        nn.functional.cross_entropy(one(batch), classes).backward()
        assert_parts(ours, one, grads=True)


@BACKENDS
def test_dtensors_between_units(backend: str) -> None:
    run_programs(backend, 4, dtensors_between_units, parallel_loss)


def replicated(rank: int) -> None:
    """Two replicas of a model in two parts, of which each rank has all shards."""
    mesh = grid(2, 1, 2, names=("replicate", "shard", "tp"))
    ours, one = build(mesh), Language()
    optimizers = sgd(ours), sgd(one)
    weight = ours.block.up.weight
    assert weight.placements == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    assert weight.device_mesh == mesh
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(ours, mesh, step)
        loss_of(one, words(step)).backward()
        clip_and_step(ours, one, optimizers)


@BACKENDS
def test_hybrid(backend: str) -> None:
    run_programs(backend, 4, replicated)


def refused(rank: int) -> None:
    mesh = grid()

    def cut(of: Any) -> nn.Module:
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), of, [Shard(0)]))
        return module

    with raises(ValueError, "got 'weight' on", "expected another dimension", "mesh['dp']"):
        trireme.fully_shard(cut(mesh["tp"]), mesh=mesh["tp"])
    with raises(ValueError, "got 'weight' on", "expected another dimension"):
        trireme.fully_shard(cut(gloo_mesh()), mesh=mesh["dp"])
    nameless = init_device_mesh("cpu", (4,))
    with raises(ValueError, "got 'weight' on", "expected another dimension"):
        trireme.fully_shard(cut(mesh["tp"]), mesh=nameless)
    ours = build(mesh)
    with raises(ValueError, "got a plain tensor for 'norm.weight'"):
        ours.norm.load_state_dict({"weight": torch.ones(8), "bias": torch.ones(8)}, assign=True)
        ours(own_words(0, mesh))


def test_what_is_refused() -> None:
    run_programs("trireme", 4, refused)


def example(rank: int) -> str:
    spec = importlib.util.spec_from_file_location("fsdp_tp", EXAMPLE)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        program.main(10)
    return printed.getvalue()


def test_the_example() -> None:
    """It reaches the losses of one process."""
    losses = []
    for ranks in (1, 4):
        printed = run_ranks(example, ranks)
        assert not any(printed[1:])
        losses.append([float(line.split()[-1]) for line in printed[0].splitlines()])
    assert len(losses[0]) == 10 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
