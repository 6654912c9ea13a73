"""What compression takes, and refuses, on all ranks alike."""

import pickle
import warnings
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from trireme import compression as c

from harness.faults import RANKLESS_FORM, raises
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks


def train(ddp: nn.Module, rank: int) -> None:
    ddp.zero_grad()
    ddp(batch(0)[rank::WORLD]).square().mean().backward()


METHODS = (c.Fp16, c.Bf16, c.Int8, c.Int4, c.Sign, partial(c.TopK, 0.01), c.PowerSGD)


@pytest.mark.parametrize(
    ("method", "wrong", "name"),
    [
        (c.Int8, {"block": 0}, "block"),
        (c.Int4, {"block": -1}, "block"),
        (c.Sign, {"block": 0}, "block"),
        (c.Int8, {"rounding": "down"}, "rounding"),
        (c.Fp16, {"between": "nodes"}, "between"),
        (c.Bf16, {"dense_below": -1}, "dense_below"),
        *((c.TopK, {"density": wrong}, "density") for wrong in (0, -1, 1.5, float("nan"))),
        (c.RandomK, {"density": 0.0}, "density"),
        (c.TopK, {"density": 0.1, "chunk": 100}, "chunk"),
        (c.TopK, {"density": 0.1, "bits": 16}, "bits"),
        (c.TopK, {"density": 0.1, "bits": 2}, "bits"),
        (c.TopK, {"density": 0.1, "decay": 0}, "decay"),
        (c.PowerSGD, {"rank": 0}, "rank"),
        (c.PowerSGD, {"start_step": -1}, "start_step"),
        (c.PowerSGD, {"min_ratio": float("nan")}, "min_ratio"),
    ],
)
def test_bad_arguments(method: Any, wrong: dict[str, Any], name: str) -> None:
    with raises(ValueError, f"{name}=", form=RANKLESS_FORM):
        method(**wrong)


@pytest.mark.parametrize("method", METHODS)
def test_values(method: Any) -> None:
    one = method()
    assert one == method() and hash(one) == hash(method())
    assert one != method(between="ranks")
    assert pickle.loads(pickle.dumps(one)) == one == deepcopy(one)
    assert one.between == "hosts" and one.dense_below == 1024
    assert one.error_feedback == (method not in (c.Fp16, c.Bf16))


def test_bytes() -> None:
    shape = (1000, 1000)
    assert c.Fp16().bytes(shape) == 2_000_000
    assert c.Int8().bytes(shape) == 1_000_000 + 4 * 3907
    assert c.Int4().bytes(shape) == 500_000 + 4 * 15625
    assert c.Sign().bytes(shape) == 125_000 + 4 * 3907
    assert c.TopK(0.01).bytes(shape) == 8 * 10_000
    assert c.TopK(1 / 64, chunk=4096).bytes((1 << 20,)) == (1 << 14) * 4 + (1 << 14) * 12 // 8
    assert c.TopK(1 / 64, chunk=4096, bits=2).bytes((1 << 20,)) == (1 << 14) * 14 // 8 + 256 * 4
    assert c.RandomK(0.01).bytes(shape) == 4 * 10_000
    assert c.PowerSGD(4).bytes(shape) == 4 * 4 * 2000
    assert c.PowerSGD(4).bytes((1_000_000,)) == 4_000_000, "a vector would not shrink"
    assert c.Int8().bytes((1023,)) == 4 * 1023
    assert c.Int8(dense_below=0).bytes(1) == 4, "a code would not shrink it"
    assert c.Int8(block=1).bytes(4096) == 4 * 4096


@on_ranks()
def test_ranks_that_differ(rank: int) -> None:
    mine = (c.Int8(between="ranks"), c.Sign(between="ranks"))[rank]
    with raises(ValueError, "Int8(", "Sign(", "rank 1"):
        trireme.DistributedDataParallel(mlp(), compression=mine)
    with raises(ValueError, "Int8(", "no compression"):
        trireme.DistributedDataParallel(mlp(), compression=mine if rank == 0 else None)
    with raises(TypeError, "str", "trireme.compression"):
        trireme.DistributedDataParallel(mlp(), compression="int8")


@on_ranks()
def test_sparse_gradients(rank: int) -> None:
    rows = nn.Embedding(4096, 2, sparse=True)
    with raises(ValueError, "sparse", "weight"):
        trireme.DistributedDataParallel(rows, compression=c.Int8(between="ranks"))


@on_ranks()
def test_a_hook_beside_it(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), compression=c.Int8(between="ranks"))
    with raises(RuntimeError, "compression", "hook"):
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


@on_ranks()
def test_copies_begin_without_residuals(rank: int) -> None:
    method = c.Sign(between="ranks", dense_below=0)
    ddp = trireme.DistributedDataParallel(mlp(), compression=method)
    assert ddp.compression is method
    for _ in range(2):
        train(ddp, rank)
    copied = pickle.loads(pickle.dumps(ddp))
    assert copied.compression == method
    fresh = trireme.DistributedDataParallel(deepcopy(ddp.module), compression=method)
    for model in (copied, fresh):
        train(model, rank)
    for one, other in zip(copied.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@on_ranks(backend="trireme")
def test_a_hook_where_nothing_is_compressed(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), compression=c.Int8(between="hosts"))
    with raises(RuntimeError, "compression", "hook"):
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


@on_ranks(backend="trireme", fresh=True)  # a process warns once
def test_one_host_is_left_alone(rank: int) -> None:
    """Said once, on rank 0; gradients go as a stream of deposits, as before."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ddp = trireme.DistributedDataParallel(mlp(), compression=c.Int8())
    assert len([w for w in said if "one host" in str(w.message)]) == (1 if rank == 0 else 0)
    plain = trireme.DistributedDataParallel(deepcopy(ddp.module))
    for model in (ddp, plain):
        for _ in range(3):
            train(model, rank)
    assert ddp.last_step()["sent_bytes"] == 0
    assert ddp.last_step()["streamed"] == plain.last_step()["streamed"]
    for one, other in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
