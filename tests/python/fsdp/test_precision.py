"""MixedPrecisionPolicy, every dtype that a parameter may have, loss scaling, offloading."""

from __future__ import annotations

import copy
import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from fsdp.ranks import (
    Sharded,
    assert_locals,
    assert_parts,
    in_training,
    local,
    pair,
    rows_of,
    sharded,
    step_both,
    torch_pair,
    train_both,
)
from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import ROWS, alone, assert_close
from shm.ranks import TORCH

BF16, FP32 = torch.bfloat16, torch.float32
# One rounding to bf16, of a gradient or of an activation.
ROUNDED = {"rtol": 2**-7, "atol": 1e-3}

POLICIES = [
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
    MixedPrecisionPolicy(param_dtype=BF16),
    MixedPrecisionPolicy(reduce_dtype=BF16),
    MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=FP32, output_dtype=FP32),
    MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32),
]


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_policies_as_torch(rank: int, world: int) -> None:
    """Dtypes exactly, values but for what a sum in bf16 rounds away."""
    for policy in POLICIES:
        ours, theirs = torch_pair(mlp, mp_policy=policy)
        for step in range(3):
            outputs = []
            for training in (ours, theirs):
                training.optimizer.zero_grad()
                outputs.append(training.model(rows_of(step, training)))
                outputs[-1].float().square().mean().backward()
            assert outputs[0].dtype == outputs[1].dtype
            torch.testing.assert_close(*outputs, **ROUNDED)
            for param in ours.model.parameters():
                assert param.dtype == param.grad.dtype == FP32
            assert_locals(ours.model, theirs.model, **ROUNDED)
            for training in (ours, theirs):
                training.optimizer.step()
        assert_locals(ours.model, theirs.model, **ROUNDED)


class Seeing(nn.Module):
    """Notes what its forward was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(6, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, index: torch.Tensor) -> Any:
        self.seen = [x.dtype, scale.dtype, index.dtype, self.inner.weight.dtype]
        return {"out": self.inner(x.to(self.inner.weight.dtype)) * scale, "index": index}


@on_shm_ranks(2)
def test_what_is_cast(rank: int) -> None:
    """Floating-point inputs, keywords too, and outputs, wherever they are in what is returned."""
    for casts in (True, False):
        policy = MixedPrecisionPolicy(
            param_dtype=BF16, output_dtype=torch.float64, cast_forward_inputs=casts
        )
        model = Seeing()
        trireme.fully_shard(model, mp_policy=policy)
        output = model(torch.ones(2, 6), scale=torch.ones(4), index=torch.arange(3))
        given = BF16 if casts else FP32
        assert model.seen == [given, given, torch.int64, BF16]
        assert output["out"].dtype == torch.float64
        assert output["index"].dtype == torch.int64
        output["out"].sum().backward()
        assert all(param.grad.dtype == FP32 for param in model.parameters())
        model.unshard()
        assert all(param.dtype == BF16 for param in model.parameters())


@on_shm_ranks(2)
def test_what_reduce_dtype_rounds(rank: int) -> None:
    """Gradients of this rank are rounded to it, not sums; torch rounds both."""
    for reduce_dtype in (None, FP32, BF16):
        model = nn.Linear(6, 5, bias=False)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        trireme.fully_shard(model, mp_policy=policy)
        for step in range(3):
            model.zero_grad()
            model(batch(step)[rank::2]).mul(torch.arange(1.0, 6.0)).sum().backward()
            weights = torch.arange(1.0, 6.0)[:, None]
            of_ranks = [weights * batch(step)[peer::2].sum(0) for peer in range(2)]
            expected = sum(tensor.to(reduce_dtype or FP32).float() for tensor in of_ranks) / 2
            got = local(model.weight.grad)
            mine = expected[:3] if rank == 0 else expected[3:]
            exact = {"rtol": 1e-5, "atol": 1e-5}
            rounded = {"rtol": 2**-8, "atol": 1e-6}
            torch.testing.assert_close(got, mine, **(rounded if reduce_dtype == BF16 else exact))


@on_shm_ranks(2)
def test_reduce_dtype_that_is_not_given(rank: int) -> None:
    """Follows the installed torch: the parameter's own dtype since 2.15, param_dtype before."""
    model = nn.Linear(6, 5)
    trireme.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    params = model._get_fsdp_state().params
    dtypes = {param.reduce_dtype for param in params}
    assert dtypes <= ({None, FP32} if TORCH >= (2, 15) else {BF16})


@on_shm_ranks(2)
def test_accumulation_in_reduce_dtype(rank: int) -> None:
    """Many small gradients: in bf16 most of them would be lost."""
    many = 60
    for reduce_dtype, close in ((FP32, {"rtol": 1e-5, "atol": 1e-5}), (BF16, ROUNDED)):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
        ours, theirs = torch_pair(mlp, mp_policy=policy)
        for training in (ours, theirs):
            training.backward(*[step % 5 for step in range(many)], sync=False)
            training.backward(7)
        assert_locals(ours.model, theirs.model, **close)


@on_shm_ranks(2)
def test_accumulated_gradients_keep_what_small_ones_add(rank: int) -> None:
    """256 + 1 is 256 in bf16."""
    model = nn.Linear(4, 2, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    trireme.fully_shard(model, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    for value in (256.0, 1.0, 1.0):
        model(torch.full((1, 4), value)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(local(model.weight.grad), torch.full((1, 4), 259.0))


def halves() -> nn.Module:
    """Gradients in fp32 of parameters in bf16; those of one layer in bf16, of another in fp64."""
    model = mlp().bfloat16()
    model[4].float()
    for layer, dtype in ((model[0], FP32), (model[4], torch.float64)):
        for parameter in layer.parameters():
            parameter.grad_dtype = dtype
    return nn.Sequential(*model[:4], InDtype(FP32), model[4])


class InDtype(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


GRAD_DTYPES = [FP32, FP32, BF16, torch.float64, torch.float64]


@pytest.mark.parametrize("reduce_dtype", [None, FP32, BF16])
@on_shm_ranks(2)
def test_gradients_in_dtypes_of_their_own(rank: int, reduce_dtype: torch.dtype | None) -> None:
    """As torch's, where it knows them: on the wire unless reduce_dtype says another, in .grad."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    ours, theirs = torch_pair(halves, mp_policy=policy)
    for step in range(4):
        for training in (ours, theirs):
            training.optimizer.zero_grad(set_to_none=step % 2 == 0)
            training.model.set_requires_gradient_sync(step != 2)
            for number in (step, step + 10):
                rows = rows_of(number, training).bfloat16()
                training.model(rows).float().square().mean().backward()
            training.model.set_requires_gradient_sync(True)
            training.model(rows).float().square().mean().backward()
        assert [parameter.grad.dtype for parameter in ours.model.parameters()] == GRAD_DTYPES
        if TORCH >= (2, 15):
            close = ROUNDED if reduce_dtype == BF16 else {"rtol": 1e-5, "atol": 1e-6}
            for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
                loose = ROUNDED if one.grad.dtype == BF16 else close
                torch.testing.assert_close(local(one.grad), local(other.grad), **loose)


@on_shm_ranks(2)
def test_when_a_dtype_of_gradients_may_be_set(rank: int) -> None:
    """Until the first forward, also on a copy and on what is assigned; afterwards it is refused."""
    model = halves()
    trireme.fully_shard(model)
    model[2].weight.grad_dtype = torch.float64
    rows = batch(0)[rank::2].bfloat16()
    model(rows).float().sum().backward()
    dtypes = [FP32, FP32, torch.float64, torch.float64, torch.float64]
    assert [parameter.grad.dtype for parameter in model.parameters()] == dtypes
    twin = copy.deepcopy(model)
    twin.load_state_dict(twin.state_dict(), assign=True)
    for _ in range(2):
        twin.zero_grad()
        twin(rows).float().sum().backward()
        assert [parameter.grad.dtype for parameter in twin.parameters()] == dtypes
    model.zero_grad()
    model[0].weight.grad_dtype = BF16
    text = "got '0.weight' with grad_dtype=torch.bfloat16 after the first forward, expected"
    with raises(RuntimeError, text):
        model(rows).float().sum().backward()
    anything = nn.Linear(6, 5).bfloat16()
    anything.weight.grad_dtype = None
    with raises(NotImplementedError, "got 'weight' with grad_dtype=None"):
        trireme.fully_shard(anything)


@on_shm_ranks(2)
def test_ranks_whose_gradients_have_other_dtypes(rank: int) -> None:
    model = nn.Linear(6, 5).bfloat16()
    if rank == 1:
        model.weight.grad_dtype = FP32
    with raises(ValueError, "'weight' BFloat16 [5, 6] with gradients in Float but rank 0 has"):
        trireme.fully_shard(model)


@on_shm_ranks(2)
def test_units_of_different_policies(rank: int) -> None:
    """The last layer in fp32 under a root in bf16, which casts its inputs only."""

    def shard(model: nn.Module, fully_shard: Any = trireme.fully_shard, **options: Any) -> None:
        low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
        fully_shard(model[4], mp_policy=MixedPrecisionPolicy(param_dtype=FP32))
        fully_shard(model[0], mp_policy=low)
        fully_shard(model, mp_policy=low)

    ours = sharded(mlp, shard=shard)
    one = alone(mlp, SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        output = ours.model(rows_of(step, ours))
        assert output.dtype == FP32
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
        step_both(ours, one, rtol=0.1, atol=2e-2)


@on_shm_ranks(2)
def test_who_casts_for_the_host(rank: int) -> None:
    """After a step all ranks compute with the bf16 of what each owner wrote."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    ours = sharded(mlp, shard=trireme.fully_shard, options={"mp_policy": policy})
    for step in range(3):
        ours.train(step)
        expected = [param.full_tensor().to(BF16) for param in ours.model.parameters()]
        ours.model.unshard()
        for param, right in zip(ours.model.parameters(), expected, strict=True):
            assert torch.equal(param, right)
        ours.model.reshard()


@pytest.mark.parametrize("world", [1, 3])
@on_shm_ranks("world")
def test_dtypes(rank: int, world: int) -> None:
    """Half precision against torch's rounding, the others against one process."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        ours, one = pair(lambda dtype=dtype: mlp(dtype))
        exact = dtype in (torch.float64, torch.float32)
        tolerance = {} if exact else {"rtol": 0.05, "atol": 1e-2}
        for step in range(3):
            for training in (ours, one):
                training.optimizer.zero_grad()
                output = training.model(rows_of(step, training, dtype))
                assert output.dtype == dtype
                output.float().square().mean().backward()
            step_both(ours, one, **tolerance)


class Complex(nn.Module):
    """A complex parameter, integers that are frozen, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.weight = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
        self.table = nn.Parameter(torch.arange(6) + 1, requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.view_as_real((x * self.table).to(torch.complex64) @ self.weight.t())
        return self.last(hidden.sum(-1)) * self.mask


@on_shm_ranks(3)
def test_complex_and_integer_parameters(rank: int) -> None:
    ours, one = pair(Complex, lr=1e-3)
    for step in range(3):
        train_both(ours, one, step, rtol=1e-5, atol=1e-4)
    assert ours.model.table.dtype == torch.int64 and ours.model.table.grad is None


@on_shm_ranks(2)
def test_autocast(rank: int) -> None:
    ours, one = pair(mlp)
    for step in range(3):
        for training in (ours, one):
            training.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=BF16):
                output = training.model(rows_of(step, training))
            assert output.dtype == BF16
            output.float().square().mean().backward()
        step_both(ours, one, rtol=0.05, atol=1e-3)


def train_scaled(training: Sharded, rank: int, spoilt: tuple[int, int] | None) -> list[float]:
    """Five scaled steps; in step ``spoilt[0]`` the loss of rank ``spoilt[1]`` is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = [scaler.get_scale()]
    for step in range(5):
        training.optimizer.zero_grad()
        loss = training.loss(step)
        if spoilt == (step, rank):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        scaler.step(training.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@on_shm_ranks(2)
def test_a_scaler_decides_alike_on_all_ranks(rank: int) -> None:
    """A step that overflows on one rank is skipped by all, as with torch."""
    for spoilt in (None, (2, 1), (0, 0)):
        ours, theirs = torch_pair(mlp)
        scales = train_scaled(ours, rank, spoilt)
        assert scales == train_scaled(theirs, rank, spoilt)
        assert any(after < before for before, after in pairwise(scales)) == (spoilt is not None)
        for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            assert_close("after scaled steps", local(one), local(other))


@on_shm_ranks(2)
def test_an_overflow_in_one_shard_only(rank: int) -> None:
    """Only the rank that owns it sees it; both skip the step."""
    ours = sharded(mlp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ours.train(0)
    before = [local(param) for param in ours.model.parameters()]
    ours.optimizer.zero_grad()
    scaler.scale(ours.loss(1)).backward()
    if rank == 1:
        ours.model[0].weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(ours.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    for param, old in zip(ours.model.parameters(), before, strict=True):
        assert torch.equal(local(param), old)
    ours.train(2)


class ScalarFirst(nn.Module):
    """A parameter of which every rank has all comes before those that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


@pytest.mark.parametrize("unscales", [False, True])
@on_shm_and_gloo_ranks(2)
def test_an_overflow_behind_a_scalar(rank: int, unscales: bool) -> None:
    """Both ranks hear of an inf in one shard, though each has all of the first gradient."""
    for optimizer_class in (SGD, trireme.optim.SGD):
        ours = sharded(ScalarFirst, optimizer_class)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        before = [local(param) for param in ours.model.parameters()]
        scaler.scale(ours.loss(0)).backward()
        gradient = ours.model.scale.grad.to_local().clone()
        if rank == 1:
            ours.model.body[0].weight.grad.to_local()[0, 0] = float("inf")
        if unscales:
            scaler.unscale_(ours.optimizer)
            torch.testing.assert_close(ours.model.scale.grad.to_local(), gradient / 2.0**10)
        scaler.step(ours.optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9, optimizer_class
        for param, old in zip(ours.model.parameters(), before, strict=True):
            assert torch.equal(local(param), old), optimizer_class
        ours.train(1)


@on_shm_ranks(2, fresh=True)
def test_offloading_is_said_to_do_nothing(rank: int) -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trireme").addHandler(handler)
    options = {"offload_policy": CPUOffloadPolicy()}
    ours, one = pair(mlp, shard=trireme.fully_shard, options=options)
    assert heard == ["[fully_shard] CPUOffloadPolicy: parameters are in CPU memory already"]
    for step in range(2):
        train_both(ours, one, step)


class WithIgnored(nn.Module):
    """Has a parameter that is left alone, and stepped by each rank as its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.alone = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.alone


@on_shm_ranks(2)
def test_ignored_parameters(rank: int) -> None:
    """Plain tensors with gradients of this rank; the rest trains as ever."""
    model = WithIgnored()
    ignored = {model.alone, model.body[0].bias}
    held = [model.alone, model.body[0].bias]
    trireme.fully_shard(model.body, ignored_params=ignored)
    trireme.fully_shard(model, ignored_params=ignored)
    assert model.alone is held[0] and model.body[0].bias is held[1]
    kept = [param for param in model.parameters() if isinstance(param, DTensor)]
    ours, one = in_training(model), alone(WithIgnored, SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
        assert len(kept) == len(list(one.model.parameters())) - 2
        here = WithIgnored()
        here.load_state_dict(one.model.state_dict())
        here(batch(step, rows=ROWS)[rank::2]).square().mean().backward()
        for mine, right in zip(held, (here.alone, here.body[0].bias), strict=True):
            assert_close("ignored", mine.grad, right.grad)
        for mine, right in zip(held, (one.model.alone, one.model.body[0].bias), strict=True):
            mine.grad.copy_(right.grad)  # the user would average them so
        step_both(ours, one)
    assert_parts(ours, one)
