"""GradScalers of all ranks take one decision, and scale as that of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, mse_loss
from torch.optim import SGD, Adam

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import WIDTH, rows, tanh_layers

CHUNKS = 4
OPTIONS = {"init_scale": 1024.0, "growth_interval": 2}
BROKEN = {2: 2, 3: 6, 6: 6}  # names, for a step, the layer whose bias gets an infinite gradient


class Breakable(nn.Linear):
    """Its bias gets an infinite gradient if it breaks, and nothing else does."""

    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        if self.breaks:
            bias = bias.clone()
            bias.register_hook(lambda gradient: gradient * math.inf)
        return linear(x, self.weight, bias)


def breakable_layers() -> nn.Sequential:
    """Eight layers: in a pipeline of two ranks layer 2 is in the first stage, 6 in the second."""
    torch.manual_seed(3)
    made = [Breakable(WIDTH, WIDTH) if i % 2 == 0 else nn.Tanh() for i in range(8)]
    return nn.Sequential(*made)


class Scaled:
    """Layers and their scaler; steps of the model that holds them, be it a pipeline or not."""

    def __init__(
        self, layers: nn.Sequential, model: nn.Module, make_optimizer: Callable[..., Any]
    ) -> None:
        self.layers, self.model = layers, model
        self.optimizer = make_optimizer(model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", **OPTIONS)
        if isinstance(model, trireme.Pipeline):
            model.scale_losses(self.scaler)

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.model, trireme.Pipeline):
            return self.model.step(x, target=y)
        losses = []
        for part, wanted in zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True):
            losses.append(mse_loss(self.model(part), wanted))
            self.scaler.scale(losses[-1] / CHUNKS).backward()
        return torch.stack(losses).detach().mean()

    def train(
        self, x: Tensor, y: Tensor, *, unscales: bool, breaks: int | None
    ) -> tuple[Tensor, bool]:
        """Returns the loss, and whether the step was skipped."""
        for number, layer in enumerate(self.layers):
            if isinstance(layer, Breakable):
                layer.breaks = number == breaks
        before = [on_this_rank(parameter).clone() for parameter in self.model.parameters()]
        self.optimizer.zero_grad()
        loss = self.backward(x, y)
        if unscales:
            self.scaler.unscale_(self.optimizer)
            is_pipe = isinstance(self.model, trireme.Pipeline)
            trireme.clip_grad_norm_(self.model if is_pipe else self.model.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after = map(on_this_rank, self.model.parameters())
        return loss, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def on_this_rank(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def train_both(one: Scaled, ours: Scaled, copy: int = 0, broken_copies: int = 1) -> None:
    """A pipeline and a model that is not split do the same; one copy breaks, and all skip."""
    scales = set()
    for step in range(10):
        breaks = BROKEN.get(step) if copy == step % broken_copies else None
        x, y = rows(100 * copy + 2 * step), rows(100 * copy + 2 * step + 1)
        expected, skips = one.train(x, y, unscales=step % 3 == 0, breaks=breaks)
        loss, ours_skips = ours.train(x, y, unscales=step % 3 == 0, breaks=breaks)
        assert skips == ours_skips == (step in BROKEN), step
        assert ours.scaler.get_scale() == one.scaler.get_scale()
        torch.testing.assert_close(loss, expected)
        whole = dict(one.model.named_parameters())
        for name, parameter in ours.model.named_parameters():
            torch.testing.assert_close(full(parameter), full(whole[name]))
        scales.add(ours.scaler.get_scale())
    assert len(scales) > 2


def fused_adam(parameters: Any, lr: float) -> Adam:
    return Adam(parameters, lr=lr, fused=True)


@pytest.mark.parametrize("make_optimizer", [SGD, fused_adam])
@on_shm_and_gloo_ranks(2, timeout=90)
def test_an_inf_in_one_stage_makes_all_ranks_skip(rank: int, make_optimizer: Any) -> None:
    """With and without unscale_ and clipping, also where the optimizer unscales by itself."""
    whole, split = breakable_layers(), breakable_layers()
    pipe = trireme.Pipeline(split, CHUNKS, ranks=True, schedule="1f1b", loss=mse_loss)
    train_both(Scaled(whole, whole, make_optimizer), Scaled(split, pipe, make_optimizer))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", ["ours", "torch's", "copies", "zero 1", "zero 2"])
@on_shm_and_gloo_ranks(4, timeout=90)
def test_scalers_beside_strategies(rank: int, kind: str, schedule: str) -> None:
    """An inf in a stage of one copy makes all ranks skip, as in a model that is only sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    whole, split = breakable_layers(), breakable_layers()
    shard = torch_fully_shard if kind == "torch's" else trireme.fully_shard
    for layer in [*whole, *(split if kind in ("ours", "torch's") else ())]:
        if isinstance(layer, Breakable):
            shard(layer, mesh=mesh["dp"])
    over = mesh if kind in ("copies", "zero 1") else mesh["pp"]
    pipe = trireme.Pipeline(split, CHUNKS, mesh=over, schedule=schedule, loss=mse_loss)
    make_optimizer: Callable[..., Any] = SGD
    if kind.startswith("zero"):
        group, stage = mesh.get_group("dp"), int(kind[-1])
        zero = trireme.ZeroRedundancyOptimizer
        make_optimizer = partial(zero, optimizer_class=SGD, process_group=group, stage=stage)
    one, ours = Scaled(whole, whole, SGD), Scaled(split, pipe, make_optimizer)
    train_both(one, ours, mesh.get_local_rank("dp"), broken_copies=2)


@on_shm_ranks(2, timeout=60)
def test_the_loss_has_no_scale(rank: int) -> None:
    pipes = [trireme.Pipeline(tanh_layers(), CHUNKS, ranks=True, loss=mse_loss) for _ in range(3)]
    pipes[0].scale_losses(GradScaler("cpu", init_scale=4096.0))
    pipes[1].scale_losses(GradScaler("cpu", enabled=False))
    losses = [pipe.step(rows(0), target=rows(1)) for pipe in pipes]
    losses += [pipe.eval_step(rows(0), target=rows(1)) for pipe in pipes]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    for scaled, off, plain in zip(*(pipe.parameters() for pipe in pipes), strict=True):
        assert torch.equal(scaled.grad, plain.grad * 4096)
        assert torch.equal(off.grad, plain.grad)


class Expert(nn.Module):
    """A layer with a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        trireme.pipeline_loss(y.square().mean(), 0.5)
        return y


@on_shm_ranks(2, timeout=60)
def test_parts_of_the_loss_are_scaled_alike(rank: int) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(Expert(), nn.Linear(WIDTH, WIDTH))

    pipes = [trireme.Pipeline(make(), CHUNKS, ranks=True, loss=mse_loss) for _ in range(2)]
    pipes[0].scale_losses(GradScaler("cpu", init_scale=4096.0))
    losses = [pipe.step(rows(0), target=rows(1)) for pipe in pipes]
    assert torch.equal(*losses)
    for scaled, plain in zip(*(pipe.parameters() for pipe in pipes), strict=True):
        assert torch.equal(scaled.grad, plain.grad * 4096)


@on_shm_ranks(2, timeout=60)
def test_a_rank_without_parameters(rank: int) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    pipe = trireme.Pipeline(module, 2, ranks=True, loss=mse_loss)
    optimizer = SGD([{"params": list(pipe.parameters())}], lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == (2 if rank == 0 else 0)
    scaler = GradScaler("cpu", init_scale=8.0)
    pipe.scale_losses(scaler)
    for step, scale in enumerate((8.0, 4.0)):
        optimizer.zero_grad()
        pipe.step(rows(1), target=rows(2))
        if rank == 0 and step == 1:
            module[0].bias.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale


@on_shm_ranks(2, timeout=60)
def test_an_optimizer_of_another_model_decides_alone(rank: int) -> None:
    pipe = trireme.Pipeline(tanh_layers(), 2, ranks=True, loss=mse_loss)
    optimizer, other = SGD(pipe.parameters(), lr=0.1), nn.Parameter(torch.ones(2))
    scaler, alone = GradScaler("cpu", init_scale=8.0), SGD([other], lr=0.1)
    pipe.scale_losses(scaler)
    pipe.step(rows(1), target=rows(2))
    before = next(pipe.parameters()).clone()
    if rank == 1:
        other.grad = torch.full((2,), math.inf)
        scaler.step(alone)
    scaler.step(optimizer)
    assert torch.equal(other, torch.ones(2))
    assert not torch.equal(before, next(pipe.parameters()))


@on_shm_ranks(2, timeout=60)
def test_what_is_refused(rank: int) -> None:
    scaler = GradScaler("cpu")

    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return scaler.scale(mse_loss(output, target))

    pipe = trireme.Pipeline(tanh_layers(), 2, ranks=True, loss=scaled)
    with raises(TypeError, "got float as scaler", form=RANKLESS_FORM):
        pipe.scale_losses(1024.0)  # type: ignore[arg-type]
    pipe.scale_losses(scaler)
    with raises(ValueError, "got a second GradScaler", form=RANKLESS_FORM):
        pipe.scale_losses(GradScaler("cpu"))
    with pytest.raises(RuntimeError, match=r"whose scale the pipeline applies itself"):
        pipe.step(rows(1), target=rows(2))
    other = trireme.Pipeline(tanh_layers(), 2, ranks=True, loss=mse_loss)
    with raises(ValueError, "a GradScaler that another pipeline has", form=RANKLESS_FORM):
        other.scale_losses(scaler)
    other.scale_losses(GradScaler("cpu", init_scale=8.0 * (1 + rank)))
    text = "scale of the loss 8.0 on rank 0, 16.0 on rank 1"
    with pytest.raises(ValueError, match=text):
        other.step(rows(1), target=rows(2))
