"""Autocast, gradient scaling and torch's _MixedPrecision, all of them on CPU."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from ddp.ranks import assert_equals_torch, record_wire
from harness.faults import RANKLESS_FORM, raises
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.recording import needs_recording
from harness.training import assert_same_on_all_ranks, gradients, values


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


@needs_recording
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
    gradients_sent = [record for record in wire.records if record.label.startswith("bucket")]
    assert {tuple(record.dtypes) for record in gradients_sent} == {("Float",)}
    assert ddp.module.count.item() == 3
    assert all(value.dtype != torch.bfloat16 for value in ddp.state_dict().values())


@needs_recording
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
    sent = [record for record in wire.records if record.label.startswith("bucket")]
    assert {tuple(record.dtypes) for record in sent} == {("BFloat16",)}
    assert_same_on_all_ranks(list(ddp.parameters()))


@needs_recording
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


def halves(grad_dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """In bf16, with gradients in another dtype."""
    model = mlp().bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = grad_dtype
    return model


def by_hand(steps: range) -> dict[str, torch.Tensor | None]:
    """Sums over micro-batches of means over ranks, each gradient computed as its rank does."""
    model = halves()
    for step in steps:
        for rank in range(WORLD):
            (model(batch(step)[rank::WORLD].bfloat16()).float().square().mean() / WORLD).backward()
    return gradients(model)


def low_step(ddp: nn.Module, step: int, rank: int) -> None:
    ddp(batch(step)[rank::WORLD].bfloat16()).float().square().mean().backward()


@needs_recording
@pytest.mark.parametrize("as_bucket_view", [False, True])
@pytest.mark.parametrize("hook", [False, True])
@on_ranks()
def test_gradients_in_fp32_of_parameters_in_bf16(
    rank: int, as_bucket_view: bool, hook: bool
) -> None:
    """Four micro-batches are one sum in fp32, which bf16 would round."""
    ddp = trireme.DistributedDataParallel(halves(), gradient_as_bucket_view=as_bucket_view)
    wire = record_wire(ddp)
    if hook:
        ddp.register_comm_hook(None, see_fp32)
    for first in (0, 4, 8):
        ddp.zero_grad(set_to_none=first != 4)
        with ddp.no_sync():
            for step in range(first, first + 3):
                low_step(ddp, step, rank)
        low_step(ddp, first + 3, rank)
        expected = by_hand(range(first, first + 4))
        assert any(
            not torch.equal(gradient, gradient.bfloat16().float()) for gradient in expected.values()
        )
        torch.testing.assert_close(gradients(ddp), expected, rtol=1e-5, atol=1e-7)
    sent = [record for record in wire.records if record.label.startswith("bucket")]
    assert hook or {tuple(record.dtypes) for record in sent} == {("Float",)}


def see_fp32(
    state: object, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    assert bucket.buffer().dtype == torch.float32
    assert {parameter.dtype for parameter in bucket.parameters()} == {torch.bfloat16}
    return allreduce_hook(None, bucket)


@on_ranks()
def test_another_dtype_of_gradients_in_the_middle(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(halves(torch.bfloat16))
    for step in range(6):
        ddp.zero_grad()
        if step % 3 == 2:
            for parameter in ddp.parameters():
                parameter.grad_dtype = torch.float32 if step == 2 else torch.bfloat16
        low_step(ddp, step, rank)
        wanted = torch.float32 if 2 <= step < 5 else torch.bfloat16
        assert {parameter.grad.dtype for parameter in ddp.parameters()} == {wanted}
        expected = by_hand(range(step, step + 1))
        tolerance = {} if wanted == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
        got = {name: gradient.float() for name, gradient in gradients(ddp).items()}
        torch.testing.assert_close(got, expected, **tolerance)


@on_ranks()
def test_ranks_whose_gradients_have_other_dtypes(rank: int) -> None:
    """At wrapping, and later."""
    expected = ["'0.weight' BFloat16 [13, 6]", "with gradients in Float", "rank 0 has"]
    with raises(RuntimeError, "got different parameters on different ranks", *expected):
        trireme.DistributedDataParallel(halves(torch.float32 if rank == 0 else torch.bfloat16))
    ddp = trireme.DistributedDataParallel(halves())
    low_step(ddp, 0, rank)
    ddp.zero_grad()
    if rank == 1:
        ddp.module[0].weight.grad_dtype = torch.bfloat16
    with raises(
        ValueError, "'0.weight'", "on rank 0 (BFloat16, gradients in Float)", "in BFloat16)"
    ):
        low_step(ddp, 1, rank)


@on_ranks()
def test_gradients_of_any_dtype(rank: int) -> None:
    """They come in the parameter's as a rule. What comes in another one is not rounded unseen."""
    ddp = trireme.DistributedDataParallel(halves(None))
    for step in range(2):
        ddp.zero_grad()
        low_step(ddp, step, rank)
        assert {parameter.grad.dtype for parameter in ddp.parameters()} == {torch.bfloat16}
    ddp.zero_grad()
    text = "got a gradient of '0.weight' in Float, expected it in BFloat16"
    with raises(RuntimeError, text, form=RANKLESS_FORM):
        output = ddp(batch(0)[rank::WORLD].bfloat16())
        (output.float().square().mean() + InFp32.apply(ddp.module[0].weight)).backward()


class InFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.sizes = weight.shape
        return weight.float().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.expand(ctx.sizes)
