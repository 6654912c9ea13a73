"""The reductions of the backend ``trireme`` against one process that folds from left to right.

Bits are compared: the order is that of the ranks, on all of them, in every run.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from harness.faults import raises
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits, assert_lists, bits
from shm.ranks import (
    COMPLEX,
    HALVES,
    INTEGERS,
    REALS,
    REDUCED,
    WORLDS,
    backend_of,
    of_all,
    reduced,
    values,
)

# All by every rank (up to 16 KiB), by slices, and by slices of several chunks.
SIZES = (0, 1, 13, 3001, 9001, 300_007)

every_world = pytest.mark.parametrize("world", WORLDS)

DTYPES = {
    ReduceOp.SUM: REDUCED,
    ReduceOp.AVG: (*INTEGERS, *REALS, *COMPLEX),
    ReduceOp.PRODUCT: (torch.bool, *INTEGERS, *REALS),
    ReduceOp.MIN: (torch.bool, *INTEGERS, *REALS),
    ReduceOp.MAX: (torch.bool, *INTEGERS, *REALS),
    ReduceOp.BAND: (torch.bool, *INTEGERS),
    ReduceOp.BOR: (torch.bool, *INTEGERS),
    ReduceOp.BXOR: (torch.bool, *INTEGERS),
}


def all_reduce(tensors: list[torch.Tensor], op: Any) -> None:
    """Calls the backend itself: torch.distributed passes complex tensors as real ones."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    backend_of().allreduce_coalesced(tensors, options).wait()


@every_world
@on_shm_ranks("world", timeout=90)
def test_all_reduce(rank: int, world: int) -> None:
    for op, dtypes in DTYPES.items():
        for dtype in dtypes:
            for numel in SIZES if op == ReduceOp.SUM else SIZES[:-1]:
                expected = reduced(op, of_all(world, numel, dtype))
                tensor = values(rank, numel, dtype)
                dist.all_reduce(tensor, op)
                assert_bits(tensor, expected, op, dtype, numel)
                tensor = values(rank, numel, dtype)
                all_reduce([tensor], op)
                assert_bits(tensor, expected, "backend", op, dtype, numel)


@every_world
@on_shm_ranks("world")
def test_reduce_and_reduce_scatter(rank: int, world: int) -> None:
    for op, dtypes in DTYPES.items():
        for dtype in dtypes:
            for numel in (0, 5, 2001) if op != ReduceOp.SUM else (0, 5, 2001, 80_003):
                inputs = of_all(world, (world, numel), dtype)
                sums = reduced(op, inputs)
                mine, root = inputs[rank].clone(), numel % world
                dist.reduce(mine, root, op)
                # What the others hold afterwards is theirs, untouched.
                expected = sums if rank == root else inputs[rank]
                assert_bits(mine, expected, "reduce", op, dtype, numel)
                output = torch.empty(numel, dtype=dtype)
                dist.reduce_scatter(output, list(inputs[rank]), op)
                assert_bits(output, sums[rank], "list", op, dtype, numel)
                for shape in ((world * numel,), (world, numel)):
                    output = torch.empty(numel, dtype=dtype)
                    dist.reduce_scatter_tensor(output, inputs[rank].reshape(shape), op)
                    assert_bits(output, sums[rank], "tensor", op, dtype, shape)
                    assert_bits(inputs[rank], of_all(world, (world, numel), dtype)[rank], "input")


@every_world
@on_shm_ranks("world")
def test_reduce_scatter_of_unequal_sizes(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for unit in (1, 30_001):
            inputs = [[values(9 * r + d, d * unit, dtype) for d in range(world)] for r in WORLDS]
            output = torch.empty(rank * unit, dtype=dtype)
            dist.reduce_scatter(output, inputs[rank])
            expected = reduced(ReduceOp.SUM, [inputs[peer][rank] for peer in range(world)])
            assert_bits(output, expected, dtype, unit)


@every_world
@on_shm_ranks("world")
def test_coalesced(rank: int, world: int) -> None:
    """Lists of tensors in one call, without flattening; 5 tensors of very different sizes."""
    shapes = [(3,), (2, 500), (), (0, 4), (70_000,)]
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        for dtype in (torch.float32, torch.float16, torch.complex64):
            inputs = [of_all(world, shape, dtype) for shape in shapes]
            expected = [reduced(op, tensor) for tensor in inputs]
            tensors = [tensor[rank].clone() for tensor in inputs]
            with dist._coalescing_manager():
                for tensor in tensors:
                    dist.all_reduce(tensor, op)
            assert_lists(tensors, expected, "manager", op, dtype)
            tensors = [tensor[rank].clone() for tensor in inputs]
            with dist._coalescing_manager(async_ops=True) as pending:
                for tensor in tensors:
                    dist.all_reduce(tensor, op)
            pending.wait()
            assert_lists(tensors, expected, "async manager", op, dtype)
            tensors = [tensor[rank].clone() for tensor in inputs]
            all_reduce(tensors, op)
            assert_lists(tensors, expected, "backend", op, dtype)
    outputs = [torch.empty(numel) for numel in (1, 1000, 0, 40_000)]
    all_inputs = [of_all(world, (world, output.numel()), torch.float32) for output in outputs]
    with dist._coalescing_manager():
        for output, inputs in zip(outputs, all_inputs, strict=True):
            dist.reduce_scatter_tensor(output, inputs[rank].flatten(), ReduceOp.AVG)
    for output, inputs in zip(outputs, all_inputs, strict=True):
        assert_bits(output, reduced(ReduceOp.AVG, inputs)[rank], "reduce_scatter", output.numel())


@every_world
@on_shm_ranks("world")
def test_premultiplied_sums(rank: int, world: int) -> None:
    """Each rank may have a factor of its own, as a number or as a tensor."""
    factors = [0.3 * (peer + 1) for peer in range(world)]
    as_number = dist._make_nccl_premul_sum(factors[rank])
    as_tensor = dist._make_nccl_premul_sum(torch.tensor([factors[rank]], dtype=torch.float64))
    for op in (as_number, as_tensor):
        for dtype in (*REALS, *COMPLEX):
            for numel in (0, 7, 3001, 70_001):
                expected = reduced(None, of_all(world, numel, dtype), factors)
                tensor = values(rank, numel, dtype)
                all_reduce([tensor], op)
                assert_bits(tensor, expected, "all_reduce", dtype, numel)
        whole = values(rank, (world, 1000), torch.float32)
        expected = reduced(None, of_all(world, (world, 1000), torch.float32), factors)
        output = torch.empty(1000)
        dist.reduce_scatter_tensor(output, whole, op)
        assert_bits(output, expected[rank], "reduce_scatter")


@every_world
@on_shm_ranks("world")
def test_products_of_complex_numbers(rank: int, world: int) -> None:
    """torch.distributed refuses them; how a compiler multiplies is not fixed to the last bit."""
    for dtype in COMPLEX:
        for numel in (7, 9001):
            tensor = values(rank, numel, dtype)
            all_reduce([tensor], ReduceOp.PRODUCT)
            expected = reduced(ReduceOp.PRODUCT, of_all(world, numel, dtype))
            torch.testing.assert_close(tensor, expected)


def run_of_sums(rank: int) -> list[torch.Tensor]:
    dist.init_process_group("trireme")
    results = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
        for numel in (5, 4000, 200_001):
            tensor = values(rank, numel, dtype)
            dist.all_reduce(tensor)
            results.append(bits(tensor))
    dist.destroy_process_group()
    return results


def test_the_same_bits_on_all_ranks_and_in_every_run() -> None:
    from harness.ranks import run_ranks

    runs = [*run_ranks(run_of_sums, 4), *run_ranks(run_of_sums, 4)]
    for run in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(run, runs[0], strict=True))


@every_world
@on_shm_ranks("world")
def test_16_bit_sums_are_rounded_once(rank: int, world: int) -> None:
    """2048 + 1 + 1 + 1 is 2048 in fp16 if every sum is rounded."""
    for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        for numel in (1, 9000):
            tensor = torch.full((numel,), big if rank == 0 else 1.0, dtype=dtype)
            dist.all_reduce(tensor)
            exact = torch.tensor(big + world - 1).to(dtype)
            assert torch.all(tensor == exact), (dtype, numel, tensor[0])
    # A sum that only fp32 can hold on the way.
    tensor = torch.full((20,), 60000.0 if rank % 2 == 0 else -60000.0, dtype=torch.float16)
    dist.all_reduce(tensor, ReduceOp.AVG)
    assert torch.isfinite(tensor).all()


@every_world
@on_shm_ranks("world")
def test_bools_are_zero_or_one(rank: int, world: int) -> None:
    for numel in (9, 40_000):
        # Any byte but 0 is true, and some programs make such tensors.
        odd = torch.full((numel,), 2 + rank, dtype=torch.uint8).view(torch.bool)
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.BAND):
            tensor = odd.clone()
            tensor[0] = False
            dist.all_reduce(tensor, op)
            assert tensor.view(torch.uint8).tolist() == [0] + [1] * (numel - 1), (op, numel)


@every_world
@on_shm_ranks("world")
def test_minimum_and_maximum_keep_a_nan(rank: int, world: int) -> None:
    for dtype in REALS:
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            for numel in (world, 9000):
                tensor = values(rank, numel, dtype)
                expected = reduced(op, of_all(world, numel, dtype))
                tensor[rank] = torch.nan
                expected[:world] = torch.nan
                dist.all_reduce(tensor, op)
                assert torch.equal(tensor.isnan(), expected.isnan()), (dtype, op)
                assert torch.equal(tensor[world:], expected[world:]), (dtype, op)


@every_world
@on_shm_ranks("world")
def test_averages_of_integers(rank: int, world: int) -> None:
    """The sum, divided towards zero, in every form of a reduction."""
    for dtype in (torch.int8, torch.int32, torch.int64):
        of_ranks = [torch.tensor([-7, 7, 100, -1, 0, peer], dtype=dtype) for peer in range(world)]
        expected = reduced(ReduceOp.AVG, of_ranks)
        assert dtype == torch.int8 or expected.tolist()[:5] == [-7, 7, 100, -1, 0]
        tensor = of_ranks[rank].clone()
        dist.all_reduce(tensor, ReduceOp.AVG, async_op=True).wait()
        assert_bits(tensor, expected, dtype)
        tensor = of_ranks[rank].clone()
        dist.reduce(tensor, world - 1, ReduceOp.AVG)
        assert_bits(tensor, expected if rank == world - 1 else of_ranks[rank], "reduce", dtype)
        part = torch.empty(6, dtype=dtype)
        dist.reduce_scatter_tensor(part, of_ranks[rank].repeat(world), ReduceOp.AVG)
        assert_bits(part, expected, "reduce_scatter", dtype)
        dist.reduce_scatter(part, [of_ranks[rank]] * world, ReduceOp.AVG)
        assert_bits(part, expected, "list", dtype)


@every_world
@on_shm_ranks("world")
def test_what_cannot_be_reduced_raises_on_all_and_touches_nothing(rank: int, world: int) -> None:
    refused = [
        (ReduceOp.AVG, torch.bool),
        *((dist._make_nccl_premul_sum(2.0), dtype) for dtype in (torch.bool, torch.int32)),
        *((ReduceOp.BAND, dtype) for dtype in (*REALS, torch.complex64)),
        *((ReduceOp.MIN, dtype) for dtype in COMPLEX),
        (ReduceOp.SUM, torch.float8_e5m2),
    ]
    for op, dtype in refused:
        tensor = values(rank, 10, dtype)
        with raises(dist.DistBackendError, f"(rank {rank} of {world})"):
            all_reduce([tensor], op)
        assert_bits(tensor, values(rank, 10, dtype), op, dtype)
    with raises(dist.DistBackendError, "AVG of bool", "cannot hold an average"):
        dist.reduce_scatter_tensor(
            torch.empty(2).bool(), torch.ones(2 * world).bool(), ReduceOp.AVG
        )
    tensor = values(rank, 10, torch.float32)
    dist.all_reduce(tensor)
    assert_bits(tensor, reduced(ReduceOp.SUM, of_all(world, 10, torch.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@on_shm_ranks(3)
def test_sums_of_sparse_tensors(rank: int, dtype: torch.dtype) -> None:
    """Entries in common, entries of one rank only, twice the same entry, and nothing at all."""

    def sparse(peer: int, empty: bool) -> torch.Tensor:
        if empty and peer == 1:
            return torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0, 4), (5, 6, 4)).to(
                dtype
            )
        indices = torch.tensor([[0, peer, peer, 4], [1, 2, 2, peer]])
        return torch.sparse_coo_tensor(indices, torch.ones(4, 4) + peer, (5, 6, 4)).to(dtype)

    for empty in (False, True):
        mine = sparse(rank, empty)
        dist.all_reduce(mine)
        assert mine.is_sparse and mine.is_coalesced()
        expected = sum(sparse(peer, empty).to_dense() for peer in range(3))
        assert torch.equal(mine.to_dense(), expected)
    nothing = torch.sparse_coo_tensor(size=(3, 2)).to(dtype)
    dist.all_reduce(nothing)
    assert nothing._nnz() == 0
