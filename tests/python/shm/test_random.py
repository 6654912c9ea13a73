"""A thousand operations of random kinds, sizes and groups, beside the same over Gloo."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_lists
from shm.ranks import values

CALLS = 200  # for each number of ranks
LARGEST = 70_000  # elements: more than a slot holds
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)

Tensors = list[torch.Tensor]
Call = Callable[[Tensors, Any, int], None]


def calls(world: int, rank: int) -> dict[str, Call]:
    """Each works on ``[one, whole]``: a tensor, and one of a part for each rank of the group."""

    def pieces(tensors: Tensors) -> Tensors:
        return list(tensors[1].chunk(world))

    def gather(tensors: Tensors, group: Any, root: int) -> None:
        dist.gather(
            tensors[0], pieces(tensors) if rank == root else None, group_dst=root, group=group
        )

    def scatter(tensors: Tensors, group: Any, root: int) -> None:
        dist.scatter(
            tensors[0], pieces(tensors) if rank == root else None, group_src=root, group=group
        )

    def reduce(tensors: Tensors, group: Any, root: int) -> None:
        dist.reduce(tensors[0], group_dst=root, group=group)
        if rank != root:
            tensors[0].zero_()  # Gloo leaves partial sums there

    def coalesced(tensors: Tensors, group: Any, root: int) -> None:
        group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()

    def asynchronous(tensors: Tensors, group: Any, root: int) -> None:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()

    def reducing(op: Any) -> Call:
        return lambda tensors, group, root: dist.all_reduce(tensors[1], op, group=group)

    return {
        "sum": reducing(dist.ReduceOp.SUM),
        "product": reducing(dist.ReduceOp.PRODUCT),
        "minimum": reducing(dist.ReduceOp.MIN),
        "maximum": reducing(dist.ReduceOp.MAX),
        "sums of a list": coalesced,
        "sums in flight": asynchronous,
        "reduce": reduce,
        "reduce_scatter": lambda t, g, root: dist.reduce_scatter_tensor(*t, group=g),
        "all_gather": lambda t, g, root: dist.all_gather(pieces(t), t[0], group=g),
        "all_gather into one": lambda t, g, root: dist.all_gather_into_tensor(t[1], t[0], group=g),
        "all_to_all": lambda t, g, root: dist.all_to_all_single(t[1], t[1].clone(), group=g),
        "broadcast": lambda t, g, root: dist.broadcast(t[1], group_src=root, group=g),
        "gather": gather,
        "scatter": scatter,
        "barrier": lambda t, g, root: dist.barrier(group=g),
    }


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@on_shm_ranks("world", timeout=110)
def test_the_same_over_gloo(rank: int, world: int) -> None:
    """Small integers in every dtype: sums and products have the same bits in any order."""
    dice = random.Random(world)  # all ranks have the same
    members = [list(range(world))]
    if world > 2:
        members += [list(range(0, world, 2)), list(range(1, world))]
    groups = []
    for ranks in members:
        pair = [dist.new_group(ranks, backend=name) for name in ("trireme", "gloo")]
        groups.append((ranks, pair))
    for number in range(CALLS):
        ranks, pair = dice.choice(groups)
        name = dice.choice(sorted(calls(1, 0)))
        numel = int(LARGEST ** dice.random()) // len(ranks) + dice.randrange(2)
        dtype = dice.choice(DTYPES)
        root = dice.randrange(len(ranks))
        if rank not in ranks:
            continue
        # Gloo sends nothing of nothing.
        numel = max(numel, 1)
        call = calls(len(ranks), ranks.index(rank))[name]
        results = []
        for group in pair:
            shapes = (numel, numel * len(ranks))
            seeds = (rank + number, rank + number + 50)
            tensors = [
                values(seed, shape, torch.int8).remainder(3).to(dtype)
                for seed, shape in zip(seeds, shapes, strict=True)
            ]
            call(tensors, group, root)
            results.append(tensors)
        assert_lists(*results, number, name, dtype, numel, ranks)
