"""Autocast, gradient scaling and torch's _MixedPrecision, all of them on CPU."""

from itertools import pairwise

import pytest
import torch
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from ddp.ranks import (
    WORLD,
    assert_equals_torch,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    on_ranks,
    record_wire,
    values,
)


@on_ranks()
def test_autocast(rank: int) -> None:
    def step(model: nn.Module, number: int, rank: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch(number)[rank::WORLD])
            assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()

    assert_equals_torch(mlp, step, rank)


def train_scaled(model: nn.Module, rank: int, spoilt: tuple[int, int] | None) -> list[object]:
    """Five scaled steps; in step ``spoilt[0]`` the loss of rank ``spoilt[1]`` is infinite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch(step)[rank::WORLD])
        loss = output.float().square().mean()
        if spoilt == (step, rank):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [scales, values(model)]


@pytest.mark.parametrize("spoilt", [None, (2, 1), (0, 0)])
@pytest.mark.parametrize("as_bucket_view", [False, True])
@on_ranks()
def test_grad_scaler(rank: int, spoilt: tuple[int, int] | None, as_bucket_view: bool) -> None:
    """A step that overflows on one rank is skipped by all, as with torch."""
    options = {"gradient_as_bucket_view": as_bucket_view}
    ddp = trireme.DistributedDataParallel(mlp(), **options)
    got = train_scaled(ddp, rank, spoilt)
    torch.testing.assert_close(got, train_scaled(TorchDDP(mlp(), **options), rank, spoilt))
    assert_same_on_all_ranks(list(ddp.parameters()))
    scales = [2.0**10, *got[0]]
    assert any(after < before for before, after in pairwise(scales)) == (spoilt is not None)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.norm = nn.LayerNorm(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, scale.dtype, self.body[0].weight.dtype, self.mean.dtype]
        self.count += 1
        return self.norm(self.body(x)) * scale


def cast_by_hand(dtype: torch.dtype, step: int) -> dict[str, torch.Tensor | None]:
    """What mixed precision means: parameters cast in the graph, per rank, gradients averaged."""
    model = Normed()
    for rank in range(WORLD):
        cast = {name: p.to(dtype) for name, p in model.named_parameters()}
        inputs = batch(step)[rank::WORLD].to(dtype), torch.ones(3, dtype=dtype)
        output = torch.func.functional_call(model, cast, inputs)
        (output.float().square().sum() / WORLD).backward()
    return gradients(model)


@on_ranks()
def test_mixed_precision_computes_low_and_keeps_full_precision(rank: int) -> None:
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = trireme.DistributedDataParallel(Normed(), mixed_precision=policy)
    wire = record_wire(ddp)
    for step in range(3):
        ddp.zero_grad()
        output = ddp(batch(step)[rank::WORLD], scale=torch.ones(3))
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        assert ddp.module.seen == [torch.bfloat16] * 3 + [torch.float32]
        assert {p.dtype for p in ddp.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in ddp.parameters()} == {torch.float32}
        expected = cast_by_hand(torch.bfloat16, step)
        torch.testing.assert_close(gradients(ddp), expected, rtol=1e-2, atol=1e-3)
    gradients_sent = [one for one in wire.records if one.label.startswith("bucket")]
    assert {tuple(one.dtypes) for one in gradients_sent} == {("Float",)}
    assert ddp.module.count.item() == 3
    assert all(value.dtype != torch.bfloat16 for value in ddp.state_dict().values())


@pytest.mark.parametrize("as_bucket_view", [False, True])
@on_ranks()
def test_mixed_precision_reduces_in_the_parameters_dtype(rank: int, as_bucket_view: bool) -> None:
    """Without reduce_dtype gradients travel in param_dtype, like torch's; .grad is full."""
    policy = _MixedPrecision(param_dtype=torch.bfloat16)
    ddp = trireme.DistributedDataParallel(
        Normed(), mixed_precision=policy, gradient_as_bucket_view=as_bucket_view
    )
    wire = record_wire(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 0)
        ddp(batch(step)[rank::WORLD], torch.ones(3)).float().square().sum().backward()
        assert {p.grad.dtype for p in ddp.parameters()} == {torch.float32}
        if step == 0:
            expected = cast_by_hand(torch.bfloat16, step)
            torch.testing.assert_close(gradients(ddp), expected, rtol=2e-2, atol=2e-2)
        optimizer.step()
    sent = [one for one in wire.records if one.label.startswith("bucket")]
    assert {tuple(one.dtypes) for one in sent} == {("BFloat16",)}
    assert_same_on_all_ranks(list(ddp.parameters()))


@on_ranks()
def test_only_the_wire_is_low_precision(rank: int) -> None:
    policy = _MixedPrecision(reduce_dtype=torch.float16)
    ddp = trireme.DistributedDataParallel(mlp(), mixed_precision=policy)
    wire = record_wire(ddp)
    output = ddp(batch(0)[rank::WORLD])
    assert output.dtype == torch.float32
    output.square().mean().backward()
    assert wire.records[0].dtypes == ["Half"]
    alone = mlp()
    alone(batch(0)).square().mean().backward()
    torch.testing.assert_close(gradients(ddp), gradients(alone), rtol=1e-2, atol=1e-3)


@on_ranks()
def test_buffer_dtype(rank: int) -> None:
    policy = _MixedPrecision(buffer_dtype=torch.float64)
    ddp = trireme.DistributedDataParallel(Normed(), mixed_precision=policy)
    assert ddp.module.mean.dtype == torch.float64
    assert ddp.module.count.dtype == torch.long


class TiedCast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.last.weight is self.first.weight
        assert self.frozen.weight.dtype == torch.bfloat16
        return self.last(self.frozen(self.first(x)))


@on_ranks()
def test_mixed_precision_of_tied_and_frozen_parameters(rank: int) -> None:
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = trireme.DistributedDataParallel(TiedCast(), mixed_precision=policy)
    for _ in range(2):
        ddp.zero_grad()
        ddp(batch(0)[rank::WORLD]).float().sum().backward()
    assert ddp.module.frozen.weight.grad is None
    assert_same_on_all_ranks([ddp.module.first.weight.grad])
    assert ddp.module.first.weight.grad.abs().sum() > 0


@on_ranks()
def test_mixed_precision_accumulates_in_full_precision(rank: int) -> None:
    """256 ones and then one more: bfloat16 would lose the last."""
    model = nn.Linear(1, 1, bias=False)
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = trireme.DistributedDataParallel(model, mixed_precision=policy)
    with ddp.no_sync():
        ddp(torch.full((1, 1), 256.0)).sum().backward()
    ddp(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 257.0
