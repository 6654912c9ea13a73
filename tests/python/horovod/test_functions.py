"""Horovod's functions over tensors: what they return, in whatever order they are issued."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme.horovod as hvd

from harness import pretended_hosts
from harness.ranks import run_ranks

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
DTYPES += (torch.uint8, torch.int8)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(rank + 10 * len(shape))
    return torch.randint(0, 7, shape, generator=made).to(dtype)


def of_all(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, shape, dtype) for rank in range(hvd.size())]


def expect(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def reduce_all(rank: int) -> None:
    hvd.init()
    for dtype in DTYPES:
        for shape in ((), (5,), (3, 4), (0, 3)):
            all_ = torch.stack(of_all(shape, torch.float64))
            own = values(rank, shape, dtype)
            kept = own.clone()
            expect(hvd.allreduce(own, op=hvd.Sum), all_.sum(0).to(dtype))
            expect(own, kept)
            mean = all_.sum(0) / hvd.size()
            if not dtype.is_floating_point:
                mean = mean.trunc()
            torch.testing.assert_close(hvd.allreduce(own), mean.to(dtype))
            expect(hvd.allreduce(own, op=hvd.Min), all_.min(0).values.to(dtype))
            expect(hvd.allreduce(own, op=hvd.Max), all_.max(0).values.to(dtype))
            expect(hvd.allreduce(own, op=hvd.Product), all_.prod(0).to(dtype))
            scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
            halves = [values(other, shape, dtype).double() * 0.5 for other in range(hvd.size())]
            if not dtype.is_floating_point:
                halves = [half.trunc() for half in halves]
            torch.testing.assert_close(scaled, (2 * sum(halves)).to(dtype))
    columns = torch.zeros(4, 6)
    view = columns[:, ::2]
    view.fill_(rank + 1.0)
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    total = sum(range(1, hvd.size() + 1))
    assert columns.sum() == 12 * total and columns[:, 1::2].sum() == 0
    for dtype in DTYPES:
        for op in (hvd.Sum, hvd.Average, hvd.Max):
            whole = values(rank, (3, 4), dtype)
            scaled = {"prescale_factor": 2.0} if op == hvd.Max else {}
            expected = hvd.allreduce(whole, op=op, **scaled)
            assert hvd.allreduce_(whole, op=op, **scaled) is whole
            expect(whole, expected)
    several = [values(rank, (3,), torch.float32), values(rank, (2, 2), torch.int64)]
    for got, one in zip(hvd.grouped_allreduce(several, op=hvd.Sum), several, strict=True):
        expect(got, torch.stack(of_all(tuple(one.shape), one.dtype)).sum(0))
    assert hvd.grouped_allreduce_(several, op=hvd.Sum)[0] is several[0]
    hvd.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_reductions(world: int) -> None:
    run_ranks(reduce_all, world, timeout=60, fresh=True)


def move_all(rank: int) -> None:
    hvd.init()
    world = hvd.size()
    for dtype in (*DTYPES, torch.bool):
        rows = [
            torch.full((other + 2, 3), other, dtype=torch.int64).to(dtype) for other in range(world)
        ]
        expect(hvd.allgather(rows[rank]), torch.cat(rows))
        scalar = torch.tensor(rank).to(dtype)
        expect(hvd.allgather(scalar), torch.arange(world).to(dtype))
        root = world - 1
        expect(hvd.broadcast(values(rank, (2, 3), dtype), root), values(root, (2, 3), dtype))
        own = values(rank, (2, 3), dtype)
        assert hvd.broadcast_(own, root) is own
        expect(own, values(root, (2, 3), dtype))
        splits = [other + 1 for other in range(world)]
        sent = torch.full((sum(splits), 2), rank).to(dtype)
        came, received = hvd.alltoall(sent, splits)
        assert received.tolist() == [rank + 1] * world and received.dtype == torch.int32
        expect(
            came, torch.arange(world).repeat_interleave(rank + 1)[:, None].expand(-1, 2).to(dtype)
        )
        expect(hvd.alltoall(torch.full((world,), rank).to(dtype)), torch.arange(world).to(dtype))
    for rows_ in (world, 2 * world + 1, 1, 0):
        all_ = torch.stack(of_all((rows_, 2), torch.float32)).sum(0)
        first = sum(rows_ // world + (other < rows_ % world) for other in range(rank))
        count = rows_ // world + (rank < rows_ % world)
        got = hvd.reducescatter(values(rank, (rows_, 2), torch.float32), op=hvd.Sum)
        expect(got, all_[first : first + count])
    index = torch.tensor([[rank, rank + 1]])
    sparse = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0]), (world + 1,))
    summed = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()
    expect(summed, hvd.allreduce(sparse.to_dense(), op=hvd.Sum))
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_moves(world: int) -> None:
    run_ranks(move_all, world, timeout=60, fresh=True)


def other_orders(rank: int) -> None:
    hvd.init()
    for _ in range(3):
        numbers = list(range(50))
        if rank % 2:
            numbers.reverse()
        handles = {
            number: hvd.allreduce_async(
                torch.full((number + 1,), rank + 1.0), name=f"x{number}", op=hvd.Sum
            )
            for number in numbers
        }
        for number in range(50):
            expect(
                hvd.synchronize(handles[number]),
                torch.full((number + 1,), 1.0 * sum(range(1, hvd.size() + 1))),
            )
        assert hvd.synchronize(handles[0]) is None
    hvd.shutdown()


@pytest.mark.parametrize("world", [2, 3])
def test_any_order(world: int) -> None:
    run_ranks(other_orders, world, timeout=60, fresh=True)


def differ(rank: int) -> list[str]:
    hvd.init()
    said = []

    def raises(program: Any) -> None:
        with pytest.raises(hvd.HorovodInternalError) as error:
            program()
        said.append(str(error.value))
        expect(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), 1.0 * hvd.size()))

    raises(lambda: hvd.allreduce(torch.ones(3 + rank), name="shapes"))
    raises(lambda: hvd.allreduce(torch.ones(3, dtype=DTYPES[rank]), name="dtypes"))
    raises(lambda: hvd.allreduce(torch.ones(3), name="ops", op=(hvd.Sum, hvd.Max)[rank]))
    raises(lambda: hvd.broadcast(torch.ones(3), rank, name="roots"))
    raises(lambda: hvd.broadcast(torch.ones(3), 5, name="no such root"))
    raises(lambda: (hvd.allreduce, hvd.allgather)[rank](torch.ones(3), name="kinds"))
    raises(lambda: hvd.allgather(torch.ones(3, 3 + rank), name="behind"))
    raises(lambda: hvd.reducescatter(torch.tensor(1.0), name="scalar"))
    raises(lambda: hvd.reducescatter(torch.ones(2), name="adasum", op=hvd.Adasum))
    hvd.shutdown()
    return said


def test_differences() -> None:
    for said in run_ranks(differ, 2, timeout=60, fresh=True):
        assert "allreduce 'shapes'" in said[0] and "[3]" in said[0] and "[4]" in said[0]
        assert "rank 0 has float32, rank 1 has float64" in said[1]
        assert "rank 0 has Sum, rank 1 has Max" in said[2]
        assert "rank 0 has 0, rank 1 has 1" in said[3]
        assert "got root rank 5, expected a rank of" in said[4]
        assert "rank 0 has allreduce, rank 1 has allgather" in said[5]


def over_hosts(rank: int, layout: str) -> None:
    """Names, payloads and decisions are messages between hosts; so is what joins and sets need."""
    options = pretended_hosts.place_of(rank, layout)
    dist.init_process_group("trireme", pg_options=options)
    hvd.init()
    world = hvd.size()
    numbers = list(range(20))
    if rank % 2:
        numbers.reverse()
    handles = {
        number: hvd.allgather_async(torch.full((rank + number,), rank), name=f"x{number}")
        for number in numbers
    }
    for number, handle in handles.items():
        expected = [torch.full((other + number,), other) for other in range(world)]
        expect(hvd.synchronize(handle), torch.cat(expected))
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 has \[1\], rank 1 has \[2\]"):
        hvd.allreduce(torch.ones(rank + 1), name="shapes")
    crossing = hvd.add_process_set([0, world - 1])
    if crossing.included():
        got = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=crossing)
        expect(got, torch.full((2,), 2.0))
    for step in range(1 + rank):
        there = sum(step < 1 + other for other in range(world))
        got = hvd.allreduce(torch.ones(2), name=f"step {step}", op=hvd.Sum)
        expect(got, torch.full((2,), 1.0 * there))
    assert hvd.join() == world - 1
    hvd.shutdown()
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["alone", "2x2"])
def test_over_hosts(layout: str) -> None:
    world = len(pretended_hosts.LAYOUTS[layout])
    run_ranks(over_hosts, world, layout, timeout=60, fresh=True)


def gradients(rank: int) -> None:
    hvd.init()
    world = hvd.size()
    factor = rank + 1.0
    x = torch.ones(world, 2, requires_grad=True)

    def gradient_of(outputs: torch.Tensor) -> torch.Tensor:
        x.grad = None
        (outputs * factor).sum().backward()
        assert x.grad is not None
        return x.grad

    total, mean = sum(range(1, world + 1)), (world + 1) / 2
    expect(gradient_of(hvd.allreduce(x, op=hvd.Sum)), torch.full((world, 2), 1.0 * total))
    expect(gradient_of(hvd.allreduce(x)), torch.full((world, 2), mean))
    expect(gradient_of(hvd.grouped_allreduce([x, x])[1]), torch.full((world, 2), mean))
    expect(gradient_of(hvd.allgather(x)), torch.full((world, 2), mean))
    expect(gradient_of(hvd.broadcast(x, 0)), torch.full((world, 2), mean if rank == 0 else 0.0))
    rows = torch.arange(1.0, world + 1)[:, None].expand(-1, 2)
    expect(gradient_of(hvd.alltoall(x)), rows)
    expect(gradient_of(hvd.reducescatter(x, op=hvd.Sum)), rows * world)
    fp16 = hvd.allreduce(x, compression=hvd.Compression.fp16)
    assert fp16.dtype == torch.float32
    expect(gradient_of(fp16), torch.full((world, 2), mean))
    hvd.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients(world: int) -> None:
    run_ranks(gradients, world, timeout=60, fresh=True)


def combine(rank: int) -> None:
    hvd.init()
    made = torch.Generator().manual_seed(3)
    parts = [torch.randn(5, generator=made) for _ in range(4)]

    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dot = a.double() @ b.double()
        a_part = a * (1 - dot / (2 * (a.double() @ a.double())))
        return (a_part + b * (1 - dot / (2 * (b.double() @ b.double())))).float()

    expected = pair(pair(parts[0], parts[1]), pair(parts[2], parts[3]))
    torch.testing.assert_close(hvd.allreduce(parts[rank], op=hvd.Adasum), expected)
    zeros = torch.zeros(5) if rank else parts[0]
    torch.testing.assert_close(hvd.allreduce(zeros, op=hvd.Adasum), parts[0])
    three = hvd.add_process_set([0, 1, 2])
    with pytest.raises(ValueError, match="Adasum over 3 ranks"):
        hvd.allreduce(parts[rank], op=hvd.Adasum, process_set=three)
    hvd.shutdown()


def test_adasum() -> None:
    run_ranks(combine, 4, timeout=60, fresh=True)


def twice(rank: int) -> None:
    hvd.init()
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice")
        with pytest.raises(ValueError, match="second operation"):
            hvd.allreduce_async(torch.ones(3), name="twice")
        assert not hvd.poll(handle)
    hvd.barrier()  # overtakes
    if rank != 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice")
    expect(hvd.synchronize(handle), torch.ones(3))
    hvd.shutdown()


def test_a_name_twice() -> None:
    run_ranks(twice, 2, timeout=60, fresh=True)


def join_unevenly(rank: int) -> list[int]:
    hvd.init()
    last = []
    for _ in range(2):
        for step in range(2 + 3 * rank):
            got = hvd.allreduce(torch.tensor([1.0, 2.0]), name=f"step {step}", op=hvd.Sum)
            there = sum(step < 2 + 3 * other for other in range(hvd.size()))
            expect(got, torch.tensor([1.0, 2.0]) * there)
            mean = hvd.allreduce(torch.ones(3), name=f"mean {step}")
            torch.testing.assert_close(mean, torch.full((3,), there / hvd.size()))
            unnamed = hvd.allreduce(torch.ones(1), op=hvd.Sum)  # numbered anew after each join
            expect(unnamed, torch.full((1,), 1.0 * there))
        if rank == hvd.size() - 1:
            with pytest.raises(hvd.HorovodInternalError, match="has joined"):
                hvd.broadcast(torch.ones(2), 0, name="refused")
        last.append(hvd.join())
    hvd.shutdown()
    return last


@pytest.mark.parametrize("world", [2, 3])
def test_join(world: int) -> None:
    for last in run_ranks(join_unevenly, world, timeout=60, fresh=True):
        assert last == [world - 1] * 2


def in_sets(rank: int) -> None:
    hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    odd = hvd.add_process_set([1, 2])
    assert odd.included() == (rank > 0) and odd.size() == 2 and odd.ranks == [1, 2]
    assert odd.process_set_id == 2 and hvd.global_process_set.ranks == [0, 1, 2]
    for _ in range(20):
        if rank > 0:
            assert odd.rank() == rank - 1
            expect(
                hvd.allreduce(torch.tensor([1.0 * rank]), op=hvd.Sum, process_set=odd),
                torch.tensor([3.0]),
            )
            expect(hvd.broadcast(torch.tensor(rank), 2, process_set=odd), torch.tensor(2))
        else:
            with pytest.raises(hvd.HorovodInternalError, match="rank 0 is not in"):
                hvd.allreduce(torch.ones(1), process_set=odd)
        expect(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([3.0]))
    with pytest.raises(ValueError, match="second process set"):
        hvd.add_process_set([2, 1])
    assert hvd.remove_process_set(odd) and not hvd.remove_process_set(odd)
    with pytest.raises(ValueError, match="registered"):
        hvd.allreduce(torch.ones(1), process_set=odd)
    again = hvd.add_process_set([1, 2])
    assert again.process_set_id == 3
    hvd.shutdown()
    hvd.init()
    expect(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([3.0]))
    hvd.shutdown()


def test_process_sets() -> None:
    run_ranks(in_sets, 3, timeout=60, fresh=True)
