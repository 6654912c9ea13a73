"""The backend ``trireme`` where ranks are on several hosts: memory inside each, Gloo between them.

Hosts are pretended by ``host_partition``; ranks that say different texts do not share memory.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.models import batch, mlp
from harness.pretended_hosts import LAYOUTS, SOME_LAYOUTS, join, on_hosts
from harness.ranks import run_ranks
from harness.tensors import assert_bits, assert_lists
from shm.ranks import COMPLEX, HALVES, INTEGERS, MOVED, REDUCED, divided, of_all, reduced, values

GLOOS_DTYPES = (torch.uint8, torch.int64, torch.bfloat16, torch.float64)
# One element; less than a slice per host; several chunks that end in the middle of one.
NUMELS = (1, 1000, 700_003)


def assert_same_everywhere(tensor: torch.Tensor, *case: object) -> None:
    """Bit for bit on all ranks, whatever the sum is."""
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, tensor)
    for other in all_of_them:
        assert_bits(other, tensor, *case)


def by_host(op: Any, layout: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """One process reduces: the ranks of each host, rounded to the dtype, then the hosts."""
    hosts = [
        [source for source, name in zip(sources, LAYOUTS[layout], strict=True) if name == host]
        for host in sorted(set(LAYOUTS[layout]))
    ]
    inside = ReduceOp.SUM if op == ReduceOp.AVG else op
    partial = [reduced(inside, host) for host in hosts]
    if op != ReduceOp.AVG:
        return reduced(op, partial)
    wide = torch.float32 if sources[0].dtype in HALVES else sources[0].dtype
    total = reduced(ReduceOp.SUM, [tensor.to(wide) for tensor in partial])
    if total.is_complex():
        parts = torch.view_as_real(total) / len(sources)
        return torch.view_as_complex(parts)
    return divided(total, len(sources)).to(sources[0].dtype)


def ops_of(dtype: torch.dtype) -> list[Any]:
    if dtype in COMPLEX:
        return [ReduceOp.SUM, ReduceOp.AVG]
    common = [ReduceOp.SUM, ReduceOp.PRODUCT]
    order = [ReduceOp.MIN, ReduceOp.MAX]
    if dtype in INTEGERS or dtype == torch.bool:
        average = [] if dtype == torch.bool else [ReduceOp.AVG]
        return [*common, *order, *average, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    return [*common, *order, ReduceOp.AVG]


# --- Reductions ----------------------------------------------------------------------------------


def all_dtypes(rank: int, world: int, layout: str) -> None:
    for dtype in REDUCED:
        for op in ops_of(dtype):
            sources = of_all(world, 1000, dtype)
            tensor = sources[rank].clone()
            dist.all_reduce(tensor, op)
            assert_bits(tensor, by_host(op, layout, sources), dtype, op)


@pytest.mark.parametrize("layout", ["2x2", "apart", "1+3", "1+1+2"])
def test_all_reduce_of_every_dtype_and_operation(layout: str) -> None:
    """In the order of the hosts, and of the ranks on each; 16-bit floats rounded once per host."""
    on_hosts(layout, all_dtypes, layout)


def sums(rank: int, world: int, layout: str) -> None:
    for numel in (0, *NUMELS):
        sources = of_all(world, numel, torch.float32)
        expected = by_host(ReduceOp.SUM, layout, sources)
        tensor = sources[rank].clone()
        dist.all_reduce(tensor)
        assert_bits(tensor, expected, "all_reduce", numel)
        works = [dist.all_reduce(sources[rank].clone(), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
            assert_bits(work.result()[0], expected, "async", numel)
        for root in range(world):
            tensor = sources[rank].clone()
            dist.reduce(tensor, root)
            assert_bits(tensor, expected if rank == root else sources[rank], "reduce", root, numel)

    # A list is one tensor in several pieces, here with gaps.
    wide = [values(rank, (300, 40), torch.bfloat16).t(), values(rank, 3, torch.bfloat16)]
    of_wide = [of_all(world, (300, 40), torch.bfloat16), of_all(world, 3, torch.bfloat16)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(wide, ReduceOp.AVG)
    assert_bits(wide[0].t(), by_host(ReduceOp.AVG, layout, of_wide[0]), "coalesced")
    assert_bits(wide[1], by_host(ReduceOp.AVG, layout, of_wide[1]), "coalesced")

    factors = [0.5 + rank for rank in range(world)]
    tensor = values(rank, 5000, torch.float64)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(factors[rank]))
    plain = reduced(ReduceOp.PREMUL_SUM, of_all(world, 5000, torch.float64), factors)
    torch.testing.assert_close(tensor, plain)
    assert_same_everywhere(tensor, "PREMUL_SUM")

    sparse = torch.sparse_coo_tensor([[rank, 7]], [1.0, 2.0], (9,))
    dist.all_reduce(sparse)
    dense = torch.zeros(9)
    dense[:world] += 1
    dense[7] += 2 * world
    assert torch.equal(sparse.to_dense(), dense)


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_sums_of_every_size(layout: str) -> None:
    on_hosts(layout, sums, layout, timeout=90)


def scattered_sums(rank: int, world: int, layout: str) -> None:
    for part in (1, 500, 300_001):
        sources = of_all(world, part * world, torch.float32)
        expected = by_host(ReduceOp.AVG, layout, sources).chunk(world)[rank]
        output = torch.empty(part)
        dist.reduce_scatter_tensor(output, sources[rank], ReduceOp.AVG)
        assert_bits(output, expected, "tensor", part)
        output = torch.empty(part)
        dist.reduce_scatter(output, list(sources[rank].chunk(world)), ReduceOp.AVG)
        assert_bits(output, expected, "list", part)
        # In place, as FSDP does.
        whole = sources[rank].clone()
        mine = whole.chunk(world)[rank]
        dist.reduce_scatter_tensor(mine, whole, ReduceOp.AVG)
        assert_bits(mine, expected, "in place", part)
    # Sizes are uneven: rank r gets 1000 * r elements.
    lists = [
        [values(10 * s + d, 1000 * d, torch.int32) for d in range(world)] for s in range(world)
    ]
    output = torch.empty(1000 * rank, dtype=torch.int32)
    dist.reduce_scatter(output, lists[rank])
    assert_bits(output, reduced(ReduceOp.SUM, [lists[s][rank] for s in range(world)]), "uneven")
    outputs = [torch.empty(10), torch.empty(7)]
    inputs = [values(rank, 10 * world, torch.float32), values(rank, 7 * world, torch.float32)]
    with dist._coalescing_manager():
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, tensor)
    for output, numel in zip(outputs, (10, 7), strict=True):
        expected = by_host(ReduceOp.SUM, layout, of_all(world, numel * world, torch.float32))
        assert_bits(output, expected.chunk(world)[rank], "coalesced")


@pytest.mark.parametrize("layout", ["2x2", "apart", "1+3", "1+1+2"])
def test_reduce_scatter(layout: str) -> None:
    on_hosts(layout, scattered_sums, layout)


# --- Moves ---------------------------------------------------------------------------------------


def moves(rank: int, world: int, dtypes: Sequence[torch.dtype]) -> None:
    for dtype, numels in ((torch.float32, NUMELS), *((dtype, (1000,)) for dtype in dtypes)):
        for numel in numels:
            mine, all_of_them = values(rank, numel, dtype), of_all(world, numel, dtype)
            outputs = [torch.empty(numel, dtype=dtype) for _ in range(world)]
            dist.all_gather(outputs, mine)
            assert_lists(outputs, all_of_them, "all_gather", dtype, numel)
            flat = torch.empty(numel * world, dtype=dtype)
            flat[rank * numel : (rank + 1) * numel] = mine
            dist.all_gather_into_tensor(flat, flat[rank * numel : (rank + 1) * numel])
            assert_bits(
                flat, torch.cat([tensor.view(dtype) for tensor in all_of_them]), "into", dtype
            )
            for root in range(world):
                tensor = mine.clone()
                dist.broadcast(tensor, root)
                assert_bits(tensor, all_of_them[root], "broadcast", root, dtype, numel)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": peer} for peer in range(world)]
    if dtypes == GLOOS_DTYPES:
        return
    uneven = [torch.empty(500 * peer) for peer in range(world)]
    dist.all_gather(uneven, values(rank, 500 * rank, torch.float32))
    assert_lists(uneven, [values(peer, 500 * peer, torch.float32) for peer in range(world)])


@pytest.mark.parametrize("layout", [*SOME_LAYOUTS, "apart", "alone"])
def test_moves_of_every_dtype_and_size(layout: str) -> None:
    """Where every rank is alone all is Gloo's, and its dtypes are."""
    on_hosts(layout, moves, GLOOS_DTYPES if layout == "alone" else MOVED)


def the_rest(rank: int, world: int, ordered: bool) -> None:
    part = torch.empty(4)
    whole = list(torch.arange(4.0 * world).chunk(world))
    dist.scatter(part, whole if rank == 1 else None, src=1)
    assert_bits(part, whole[rank])
    parts = [torch.empty(4) for _ in range(world)]
    dist.gather(part, parts if rank == 2 else None, dst=2)
    if rank == 2:
        assert_lists(parts, whole)
    swapped = torch.empty(world)
    dist.all_to_all_single(swapped, torch.arange(float(world)) + 10 * rank)
    assert swapped.tolist() == [10.0 * peer + rank for peer in range(world)]
    received = torch.empty(3)
    request = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world)
    dist.recv(received, (rank - 1) % world)
    request.wait()
    assert torch.all(received == (rank - 1) % world)
    if not ordered:
        return
    for step in range(20):  # in order, among what other threads do
        tensor = torch.full((2000,), float(rank))
        dist.broadcast(tensor, step % world, async_op=True)
        work = dist.all_reduce(tensor, ReduceOp.MAX, async_op=True)
        dist.barrier()
        assert work.is_completed() and torch.all(tensor == step % world)


@pytest.mark.parametrize("layout", [*SOME_LAYOUTS, "alone"])
def test_what_goes_over_gloo_alone_and_the_order_of_all(layout: str) -> None:
    on_hosts(layout, the_rest, layout != "alone")


def said(rank: int, layout: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = join(rank, layout)
    # A group inside one of the hosts shares memory, and says nothing.
    pair = dist.new_group([0, 1], pg_options=options)
    if rank < 2:
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=pair)
        assert torch.all(tensor == 2)
    dist.destroy_process_group()
    return [str(warning.message) for warning in caught if "shm_backend" in str(warning.message)]


def test_the_layout_is_said_once() -> None:
    texts = run_ranks(said, 4, "2x2")
    assert texts[1:] == [[], [], []]
    (text,) = texts[0]
    assert text.startswith("[shm_backend] ranks are on 2 hosts (rank 2 runs elsewhere): ")
    assert "shared memory inside each, Gloo between them (rank 0 of 4)." in text


# --- Training ------------------------------------------------------------------------------------


def train(rank: int, world: int, kind: str) -> list[torch.Tensor]:
    model: Any = mlp()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = TorchDDP(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step)[rank::world]).square().mean().backward()
        optimizer.step()
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [
        parameter.full_tensor().clone() if isinstance(parameter, DTensor) else parameter
        for parameter in parameters
    ]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("layout", ["2x2", "1+3"])
def test_models_train_as_in_one_process(layout: str, kind: str) -> None:
    """torch's DDP and FSDP2; contract/test_hosts.py has ours."""
    results = on_hosts(layout, train, kind)
    alone = mlp()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        alone(batch(step)).square().mean().backward()
        optimizer.step()
    for result in results:
        for one, other, expected in zip(result, results[0], alone.parameters(), strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, expected.detach())
