"""The collectives of the backend ``trireme`` that move data, against what every rank can compute.

Bytes must arrive as they were sent, for each dtype, number of ranks and way of calling; the same
calls give the same bits over Gloo.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.meeting import store
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits, assert_lists
from shm.ranks import MOVED, TORCH, WORLDS, backend_of, of_all, values

# Nothing, less than a cache line, less and more than a slot (256 KiB).
SIZES = (0, 1, 7, 3001, 150_001)

every_world = pytest.mark.parametrize("world", WORLDS)


def sizes_for(dtype: torch.dtype) -> tuple[int, ...]:
    return SIZES if dtype in (torch.float32, torch.bool) else SIZES[:-1]


def empties(world: int, shape: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Results that no rank could have written by chance."""
    return [torch.empty(shape, dtype=dtype) for _ in range(world)]


@every_world
@on_shm_ranks("world")
def test_all_gather(rank: int, world: int) -> None:
    for dtype in MOVED:
        for numel in sizes_for(dtype):
            mine, expected = values(rank, numel, dtype), of_all(world, numel, dtype)
            outputs = empties(world, numel, dtype)
            dist.all_gather(outputs, mine)
            assert_lists(outputs, expected, "list", dtype, numel)
            flat = torch.empty(world * numel, dtype=dtype)
            dist.all_gather_into_tensor(flat, mine)
            assert_bits(flat, torch.cat(expected), "flat", dtype, numel)
            stacked = torch.empty(world, numel, dtype=dtype)
            dist.all_gather_into_tensor(stacked, mine)
            assert_bits(stacked, torch.stack(expected), "stacked", dtype, numel)
    # In place, as FSDP does: the input is this rank's part of the output.
    flat = torch.zeros(world * 5000)
    part = flat[rank * 5000 : (rank + 1) * 5000]
    part.copy_(values(rank, 5000, torch.float32))
    dist.all_gather_into_tensor(flat, part)
    assert_bits(flat, torch.cat(of_all(world, 5000, torch.float32)), "in place")


@every_world
@on_shm_ranks("world")
def test_all_gather_of_unequal_sizes(rank: int, world: int) -> None:
    """Every rank knows all sizes."""
    for dtype in (torch.int16, torch.float32):
        for unit in (1, 40_001):
            expected = [values(peer, peer * unit, dtype) for peer in range(world)]
            outputs = [torch.empty_like(tensor) for tensor in expected]
            dist.all_gather(outputs, expected[rank].clone())
            assert_lists(outputs, expected, dtype, unit)


@every_world
@on_shm_ranks("world")
def test_all_gather_coalesced(rank: int, world: int) -> None:
    shapes = [(3,), (), (2, 500), (0, 4), (70_000,)]
    of_rank = [[values(r * 9 + i, s, torch.float32) for i, s in enumerate(shapes)] for r in WORLDS]
    outputs = [[torch.empty(shape) for shape in shapes] for _ in range(world)]
    dist.all_gather_coalesced(outputs, of_rank[rank])
    for peer in range(world):
        assert_lists(outputs[peer], of_rank[peer], "lists", peer)
    flat = [torch.empty(world * tensor.numel()) for tensor in of_rank[0]]
    with dist._coalescing_manager():
        for output, tensor in zip(flat, of_rank[rank], strict=True):
            dist.all_gather_into_tensor(output, tensor.flatten())
    for index, output in enumerate(flat):
        parts = [of_rank[peer][index].flatten() for peer in range(world)]
        assert_bits(output, torch.cat(parts), "into one tensor", index)


@every_world
@on_shm_ranks("world")
def test_broadcast(rank: int, world: int) -> None:
    for dtype in MOVED:
        for numel in sizes_for(dtype):
            for root in range(world):
                tensor = values(rank, numel, dtype)
                # float8: torch.distributed says that NCCL needs newer devices; the group does not
                backend_of().broadcast([tensor], options(dist.BroadcastOptions, root)).wait()
                assert_bits(tensor, values(root, numel, dtype), dtype, numel, root)
    for root in range(world):
        tensor = values(rank, 100, torch.complex64)
        dist.broadcast(tensor, root)
        assert_bits(tensor, values(root, 100, torch.complex64), "complex", root)


def options(kind: Any, root: int = 0) -> Any:
    made = kind()
    made.rootRank = root
    return made


@every_world
@on_shm_ranks("world")
def test_gather_and_scatter(rank: int, world: int) -> None:
    for dtype in MOVED:
        for numel in sizes_for(dtype):
            root = numel % world
            mine, all_of_them = values(rank, numel, dtype), of_all(world, numel, dtype)
            outputs = empties(world, numel, dtype) if rank == root else None
            dist.gather(mine, outputs, dst=root)
            assert_bits(mine, all_of_them[rank], "the input of gather", dtype, numel)
            if outputs is not None:
                assert_lists(outputs, all_of_them, "gather", dtype, numel)
            output = torch.empty(numel, dtype=dtype)
            dist.scatter(output, all_of_them if rank == root else None, src=root)
            assert_bits(output, all_of_them[rank], "scatter", dtype, numel)


@every_world
@on_shm_ranks("world")
def test_all_to_all(rank: int, world: int) -> None:
    for dtype in MOVED:
        for numel in sizes_for(dtype):
            sent = [values(9 * rank + peer, numel, dtype) for peer in range(world)]
            expected = [values(9 * peer + rank, numel, dtype) for peer in range(world)]
            outputs = empties(world, numel, dtype)
            dist.all_to_all(outputs, sent)
            assert_lists(outputs, expected, "list", dtype, numel)
            single = torch.empty(world * numel, dtype=dtype)
            dist.all_to_all_single(single, torch.cat(sent))
            assert_bits(single, torch.cat(expected), "single", dtype, numel)


@every_world
@on_shm_ranks("world")
def test_all_to_all_of_uneven_splits(rank: int, world: int) -> None:
    """From s to d go 3 s + d rows, so that some send nothing."""
    for dtype in (torch.bool, torch.int64, torch.bfloat16):
        for width in (1, 20_000):

            def rows(source: int, to: int, width: int = width, dtype: Any = dtype) -> torch.Tensor:
                return values(9 * source + to, (3 * source + to, width), dtype)

            sent = [rows(rank, peer) for peer in range(world)]
            expected = [rows(peer, rank) for peer in range(world)]
            outputs = [torch.empty_like(tensor) for tensor in expected]
            dist.all_to_all(outputs, sent)
            assert_lists(outputs, expected, "list", dtype, width)
            single = torch.empty_like(torch.cat(expected))
            splits = [[len(tensor) for tensor in expected], [len(tensor) for tensor in sent]]
            dist.all_to_all_single(single, torch.cat(sent), *splits)
            assert_bits(single, torch.cat(expected), "single", dtype, width)


@every_world
@on_shm_ranks("world")
def test_objects(rank: int, world: int) -> None:
    """Pickles of very different lengths; what torch sends through uint8 tensors."""
    of_rank = [{"rank": r, "text": "x" * 10_000 * r, "tensor": torch.ones(r)} for r in range(world)]

    def same(got: Any, peer: int) -> bool:
        return got["text"] == of_rank[peer]["text"] and got["tensor"].numel() == peer

    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, of_rank[rank])
    assert all(same(got, peer) for peer, got in enumerate(gathered))
    for root in range(world):
        objects = [of_rank[rank], rank]
        dist.broadcast_object_list(objects, root)
        assert same(objects[0], root) and objects[1] == root
        into = [None] * world if rank == root else None
        dist.gather_object(of_rank[rank], into, dst=root)
        assert into is None or all(same(got, peer) for peer, got in enumerate(into))
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, of_rank if rank == root else None, src=root)
        assert same(mine[0], rank)


def asynchronous_barrier() -> None:
    dist.barrier(async_op=True).wait()


@every_world
@on_shm_ranks("world")
def test_barriers(rank: int, world: int) -> None:
    """Nobody leaves one before all have come."""
    monitored = dist.group.WORLD.monitored_barrier  # torch 2.11 has its own for Gloo only
    if TORCH >= (2, 14):
        monitored = dist.monitored_barrier
    for number, call in enumerate((dist.barrier, asynchronous_barrier, monitored)):
        store().add(f"came to {number}", 1)
        call()
        assert store().add(f"came to {number}", 0) == world


@every_world
@on_shm_ranks("world")
def test_the_same_calls_over_gloo(rank: int, world: int) -> None:
    gloo = dist.new_group(backend="gloo")
    calls = {
        "all_gather": lambda t, o, g: dist.all_gather(list(o.chunk(world)), t, group=g),
        "all_gather_into": lambda t, o, g: dist.all_gather_into_tensor(o, t, group=g),
        "all_to_all": lambda t, o, g: dist.all_to_all_single(o, o.clone(), group=g),
        "broadcast": lambda t, o, g: dist.broadcast(o, world - 1, group=g),
        "reduce_scatter": lambda t, o, g: dist.reduce_scatter_tensor(t, o, group=g),
        "all_reduce": lambda t, o, g: dist.all_reduce(o, group=g),
        "reduce": lambda t, o, g: dist.reduce(t, 0, group=g),
        "max": lambda t, o, g: dist.all_reduce(o, dist.ReduceOp.MAX, group=g),
        "product": lambda t, o, g: dist.all_reduce(o, dist.ReduceOp.PRODUCT, group=g),
        "scatter": lambda t, o, g: dist.scatter(
            t, list(o.chunk(world)) if rank == 0 else None, src=0, group=g
        ),
    }
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8):
        for name, call in calls.items():
            results = []
            for group in (dist.group.WORLD, gloo):
                # Small integers: sums and products have the same bits in any order.
                tensor = values(rank, 12, torch.int8).remainder(3).to(dtype)
                output = values(rank + 5, 12 * world, torch.int8).remainder(3).to(dtype)
                call(tensor, output, group)
                if name == "reduce" and rank != 0:
                    tensor.zero_()  # Gloo leaves partial sums there
                results.append((tensor, output))
            assert_lists(*results, name, dtype)
