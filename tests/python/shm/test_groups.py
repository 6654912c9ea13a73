"""The backend ``trireme`` under async operations, several groups, meshes and DTensor."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from harness.faults import raises
from harness.meeting import set_timeout, until
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits
from shm.ranks import TORCH, backend_of, of_all, reduced, total, values


def check_sum(group: Any, members: list[int], numel: int = 500) -> None:
    tensor = values(dist.get_rank(), numel, torch.float32)
    dist.all_reduce(tensor, group=group)
    assert_bits(tensor, total([values(rank, numel, torch.float32) for rank in members]), members)


# --- Async operations ----------------------------------------------------------------------------


@on_shm_ranks(3)
def test_an_async_operation(rank: int) -> None:
    for numel in (4, 100_000):
        tensor = values(rank, numel, torch.float32)
        expected = total(of_all(3, numel, torch.float32))
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait() is True
        assert work.is_completed() and work.is_success()
        assert_bits(tensor, expected)
        assert work.wait() is True  # again
        assert_bits(work.result()[0], expected)

        tensor = values(rank, numel, torch.float32)
        halves = (
            dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] / 2)
        )
        assert_bits(halves.wait(), expected / 2)

    # Nobody waits: polling must come to an end all the same.
    work = dist.all_reduce(torch.ones(3), async_op=True)
    until(work.is_completed)


@on_shm_ranks(3)
def test_many_async_operations_run_in_order(rank: int) -> None:
    """Each writes what the next one reads; synchronous ones come after all that are queued."""
    tensor = torch.full((9000,), float(rank))
    works = []
    for step in range(40):
        works.append(dist.broadcast(tensor, step % 3, async_op=True))
        works.append(dist.all_reduce(tensor, ReduceOp.MAX, async_op=True))
        works.append(dist.all_reduce(tensor, ReduceOp.AVG, async_op=True))
    dist.all_reduce(tensor)
    assert all(work.is_completed() for work in works)
    assert torch.all(tensor == 0)  # what rank 0 had, from the first operation on

    order: list[int] = []
    futures = []
    for number in range(20):
        future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
        futures.append(future.then(lambda f, number=number: order.append(number)))
    torch.futures.wait_all(futures)
    assert order == list(range(20))


@on_shm_ranks(2)
def test_works_are_waited_for_in_any_order(rank: int) -> None:
    tensors = [torch.full((1000,), float(number + rank)) for number in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number in reversed(range(10)) if rank == 0 else range(10):
        works[number].wait()
        assert torch.all(tensors[number] == 2 * number + 1)


@on_shm_ranks(2)
def test_what_an_async_operation_throws_comes_out_of_wait(rank: int) -> None:
    mismatched = dist.all_reduce(torch.ones(2 + rank), async_op=True)
    fine = dist.all_reduce(torch.ones(2), async_op=True)
    with raises(dist.DistBackendError, "all_reduce of 3 float32"):
        mismatched.wait()
    assert mismatched.is_completed() and not mismatched.is_success()
    fine.wait()
    future = dist.all_reduce(torch.ones(2 + rank), async_op=True).get_future()
    with pytest.raises(Exception, match="all_reduce of 3 float32"):
        future.wait()
    dist.all_reduce(torch.ones(2))


@on_shm_ranks(2)
def test_a_tensor_may_go_while_it_is_in_flight(rank: int) -> None:
    """The operation holds what it reads and writes."""
    for _ in range(20):
        dist.all_reduce(torch.ones(50_000), async_op=True)
    dist.barrier()


@on_shm_ranks(2)
def test_a_callback_may_use_the_group(rank: int) -> None:
    """It runs on the thread that completed the operation; what it starts is queued."""
    sums: list[torch.Tensor] = []

    def more(future: Any) -> None:
        tensor = future.value()[0] * 10
        sums.append(tensor)
        dist.all_reduce(tensor, async_op=True)

    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(more).wait()
    dist.barrier()
    assert sums[0].tolist() == [40.0] * 4


@on_shm_ranks(2, timeout=40)
def test_callbacks_and_temporaries_of_python_while_others_ask_for_futures(rank: int) -> None:
    """Threads that hold Python's lock wait for the queue, whose thread frees Python's objects."""
    for _ in range(20):
        futures = []
        for _ in range(100):
            future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
            futures.append(future.then(lambda f: f.value()[0] + 1))
        assert all(future.wait()[0] == 3 for future in futures)


@on_shm_ranks(2, timeout=40)
def test_a_group_that_ends_while_a_callback_runs(rank: int) -> None:
    ended: list[int] = []
    begun, ending = threading.Event(), threading.Event()
    group = dist.new_group([0, 1])

    def call_back(number: int) -> None:
        begun.set()
        assert ending.wait(20)
        ended.append(number)

    for number in range(3):
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        work.get_future().then(lambda f, number=number: call_back(number))
    assert begun.wait(20)
    ending.set()
    dist.destroy_process_group(group)
    assert sorted(ended) == [0, 1, 2], ended  # one that takes long may be overtaken


@pytest.mark.parametrize("numel", [10, 2_000_000])
@on_shm_ranks(2, timeout=40)
def test_two_groups_in_opposite_order(rank: int, numel: int) -> None:
    """Async ones of different groups do not wait for each other."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for _ in range(3):
        tensors = [torch.ones(numel), torch.full((numel,), 3.0)]
        order = (0, 1) if rank == 0 else (1, 0)
        works = [
            dist.all_reduce(tensors[place], group=groups[place], async_op=True) for place in order
        ]
        for work in works:
            work.wait()
        assert torch.all(tensors[0] == 2) and torch.all(tensors[1] == 6)


@on_shm_ranks(2)
def test_groups_on_threads_of_their_own(rank: int) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    wrong: list[int] = []

    def work_with(number: int) -> None:
        for step in range(30):
            tensor = torch.full((700,), float(number * step + rank))
            dist.all_reduce(tensor, group=groups[number])
            if not torch.all(tensor == 2 * number * step + 1):
                wrong.append(number)

    threads = [threading.Thread(target=work_with, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- Groups --------------------------------------------------------------------------------------


@on_shm_ranks(4)
def test_groups_of_some_ranks(rank: int) -> None:
    """Their ranks are counted anew, roots are named by the ranks of the world."""
    members = ([0, 1], [2, 3], [3, 1, 0], [2], [0, 1, 2, 3])
    groups = [dist.new_group(member, use_local_synchronization=False) for member in members]
    for group, of_group in zip(groups, members, strict=True):
        if rank not in of_group:
            continue
        assert dist.get_backend(group) == "trireme"
        check_sum(group, sorted(of_group))
        tensor = values(rank, 30, torch.int32)
        dist.broadcast(tensor, of_group[-1], group=group)
        assert_bits(tensor, values(of_group[-1], 30, torch.int32))
    pairs, others = dist.new_subgroups(2), dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    check_sum(pairs[0], [0, 1] if rank < 2 else [2, 3])
    check_sum(others[0], [0, 3] if rank in (0, 3) else [1, 2])
    check_sum(None, [0, 1, 2, 3])


@on_shm_ranks(4)
def test_groups_that_only_their_members_make(rank: int) -> None:
    """Nobody else is waited for; torch names them by their ranks and the number of the call."""
    for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3]), ([3, 0], [2, 1]), ([0, 1], [2, 3])):
        mine = next(pair for pair in pairs if rank in pair)
        check_sum(dist.new_group(mine, use_local_synchronization=True), sorted(mine))


@on_shm_ranks(4)
def test_a_group_is_given_back_and_made_again(rank: int) -> None:
    for _ in range(4):
        group = dist.new_group([0, 1, 2, 3])
        check_sum(group, [0, 1, 2, 3], numel=20_000)
        dist.destroy_process_group(group)
    check_sum(None, [0, 1, 2, 3])


@pytest.mark.skipif(TORCH < (2, 14), reason="torch splits groups of CUDA devices only")
@on_shm_ranks(4)
def test_a_split_group(rank: int) -> None:
    """torch counts the child's ranks by their place in the list."""
    halves = [[2, 0], [1, 3]]
    half = dist.split_group(split_ranks=halves)
    mine = halves[rank % 2]
    assert dist.get_backend(half) == "trireme"
    assert (half.rank(), half.size()) == (mine.index(rank), 2)
    tensor = values(rank, 500, torch.float32)
    dist.all_reduce(tensor, group=half)
    assert_bits(tensor, total([values(peer, 500, torch.float32) for peer in mine]))
    tensor = values(rank, 10, torch.int64)
    dist.broadcast(tensor, mine[0], group=half)
    assert_bits(tensor, values(mine[0], 10, torch.int64))
    some = dist.split_group(split_ranks=[[1, 2, 3]])
    if rank > 0:
        check_sum(some, [1, 2, 3])
    check_sum(None, [0, 1, 2, 3])


# --- Meshes, functional collectives, DTensor -----------------------------------------------------


@pytest.mark.parametrize("flags", [0, 1])
@on_shm_ranks(4)
def test_a_group_without_one_of_its_ranks(rank: int, flags: int) -> None:
    """Also where that rank has ended the group; twice. The timeout that was set last stays."""
    backend = backend_of()
    assert backend.supports_shrinking
    dist.all_reduce(torch.ones(3))
    set_timeout(77)
    with raises(ValueError, "shrink got the rank that calls it"):
        backend.shrink([rank])
    gone = [[2], [0, 2]]
    if rank == 2:
        return backend.abort() if flags else None
    for ranks in gone:
        if rank in ranks:
            return None
        smaller = backend.shrink(ranks, flags)
        members = [peer for peer in range(4) if peer not in ranks]
        assert (smaller.rank(), smaller.size()) == (members.index(rank), len(members))
        assert smaller.options._timeout == timedelta(seconds=77)
        tensor = torch.full((500,), float(rank))
        smaller.allreduce([tensor], dist.AllreduceOptions()).wait()
        assert torch.all(tensor == sum(members))
    return None


@on_shm_ranks(4)
def test_a_mesh_of_two_dimensions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert {dist.get_backend(mesh.get_group(name)) for name in ("outer", "inner")} == {"trireme"}
    check_sum(mesh.get_group("outer"), [rank % 2, rank % 2 + 2])
    check_sum(mesh.get_group("inner"), [rank // 2 * 2, rank // 2 * 2 + 1])
    check_sum(mesh._flatten().get_group(), [0, 1, 2, 3])


@on_shm_ranks(4, fresh=True)
def test_functional_collectives(rank: int) -> None:
    mine, all_of_them = values(rank, (8, 3), torch.float32), of_all(4, (8, 3), torch.float32)
    group = dist.group.WORLD
    assert_bits(functional.all_reduce(mine, "sum", group).clone(), total(all_of_them))
    gathered = functional.all_gather_tensor(mine, 0, group)
    assert_bits(gathered.clone(), torch.cat(all_of_them))
    gathered = functional.all_gather_tensor(mine, 1, group)
    assert_bits(gathered.clone(), torch.cat(all_of_them, dim=1))
    part = functional.reduce_scatter_tensor(mine, "avg", 0, group)
    assert_bits(part.clone(), reduced(ReduceOp.AVG, all_of_them).chunk(4)[rank])
    swapped = functional.all_to_all_single(mine, None, None, group)
    assert_bits(swapped.clone(), torch.cat([tensor.chunk(4)[rank] for tensor in all_of_them]))
    assert_bits(functional.broadcast(mine, 2, group).clone(), all_of_them[2])
    several = functional.all_reduce_coalesced([mine, mine[0]], "sum", group)
    assert_bits(several[1].clone(), total([tensor[0] for tensor in all_of_them]))
    assert_bits(mine, all_of_them[rank])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor * 2, "sum", group) + 1

    torch.testing.assert_close(compiled(mine), 2 * total(all_of_them) + 1)


@on_shm_ranks(4, timeout=90)
def test_dtensors_are_redistributed(rank: int) -> None:
    """Every placement to every other, on rows that do not divide evenly."""
    for mesh, placements in (
        (
            init_device_mesh("cpu", (4,)),
            [[Replicate()], [Shard(0)], [Shard(1)], [Partial()], [Partial("max")]],
        ),
        (
            init_device_mesh("cpu", (2, 2)),
            [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)]],
        ),
    ):
        whole = values(7, (10, 6), torch.float64)
        for source in placements:
            if any(isinstance(placement, Partial) for placement in source):
                local = whole / 4 if source[0].reduce_op == "sum" else whole - float(rank > 0)
                made = DTensor.from_local(local, mesh, source, run_check=False)
            else:
                made = distribute_tensor(whole, mesh, source)
            for to in placements:
                if any(isinstance(placement, Partial) for placement in to):
                    continue
                torch.testing.assert_close(made.redistribute(mesh, to).full_tensor(), whole)
    rows = distribute_tensor(
        values(1, (8, 8), torch.float32), init_device_mesh("cpu", (4,)), [Shard(0)]
    )
    product = (rows @ rows.redistribute(placements=[Shard(1)])).full_tensor()
    plain = values(1, (8, 8), torch.float32)
    torch.testing.assert_close(product, plain @ plain)
