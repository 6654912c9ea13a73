"""Collectives of the backend ``trireme`` whose results lie where their inputs do: the values are
those that come out where these are apart."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits, assert_lists
from shm.ranks import backend_of, of_all, total, values

WORLD = 3


def shifted(rows: int, by: int) -> tuple[torch.Tensor, Callable[[int, int], torch.Tensor]]:
    """One memory, and a function for the part of ``rows`` elements at a place plus ``by``."""
    memory = torch.zeros((WORLD + 1) * rows + 8)
    return memory, lambda place, length: memory[place * rows + by : place * rows + by + length]


@pytest.mark.parametrize("rows", [4, 150_000])
@on_shm_ranks(WORLD)
def test_outputs_that_overlap_inputs(rank: int, rows: int) -> None:
    """It is as if the inputs had been copied before; ``by`` 0 is in place, with nothing to copy."""
    whole = [values(peer, WORLD * rows, torch.float32) for peer in range(WORLD)]
    summed = total(whole).chunk(WORLD)[rank]
    sent = [tensor.chunk(WORLD)[rank] for tensor in whole]
    for by in (0, 1, 3, rows // 2):
        memory, part = shifted(rows, by)
        source = memory[: WORLD * rows]

        source.copy_(whole[rank])
        dist.reduce_scatter_tensor(part(rank, rows), source)
        assert_bits(part(rank, rows), summed, by, "reduce_scatter_tensor")
        source.copy_(whole[rank])
        dist.reduce_scatter(part(rank, rows), list(source.chunk(WORLD)))
        assert_bits(part(rank, rows), summed, by, "reduce_scatter")
        source.copy_(whole[rank])
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(part(rank, rows), source)
        assert_bits(part(rank, rows), summed, by, "reduce_scatter_tensor, coalesced")

        mine = memory[rank * rows : (rank + 1) * rows]
        mine.copy_(whole[rank][:rows])
        dist.all_gather_into_tensor(part(0, WORLD * rows), mine)
        expected = torch.cat([tensor[:rows] for tensor in whole])
        assert_bits(part(0, WORLD * rows), expected, by, "all_gather_into_tensor")
        outputs = [part(place, rows) for place in range(WORLD)]
        for gather in (
            dist.all_gather,
            lambda to, of: dist.gather(of, to if rank == 1 else None, 1),
        ):
            for output in outputs:
                output.zero_()
            mine.copy_(whole[rank][:rows])
            gather(outputs, mine)
            if gather is dist.all_gather or rank == 1:
                assert_lists(outputs, [tensor[:rows] for tensor in whole], by, "all_gather, gather")

        source.copy_(whole[rank])
        dist.all_to_all_single(part(0, WORLD * rows), source)
        assert_bits(part(0, WORLD * rows), torch.cat(sent), by, "all_to_all_single")
        source.copy_(whole[rank])
        dist.all_to_all(outputs, list(source.chunk(WORLD)))
        assert_lists(outputs, sent, by, "all_to_all")
        source.copy_(whole[rank])
        dist.scatter(part(rank, rows), list(source.chunk(WORLD)) if rank == 2 else None, 2)
        assert_bits(part(rank, rows), whole[2].chunk(WORLD)[rank], by, "scatter")


@pytest.mark.parametrize("rows", [4, 150_000])
@on_shm_ranks(WORLD)
def test_blocks_of_a_matrix_that_change_their_places(rank: int, rows: int) -> None:
    """all_to_all in the memory of its input, with splits that put parts where others are read."""
    sends = [(rank + 2 * to) % WORLD * rows for to in range(WORLD)]
    gets = [(of + 2 * rank) % WORLD * rows for of in range(WORLD)]
    whole = [values(peer, sum(sends), torch.float32) for peer in range(WORLD)]
    memory = whole[rank].clone()
    dist.all_to_all_single(memory, memory, gets, sends)
    parts = [
        tensor.split([(of + 2 * to) % WORLD * rows for to in range(WORLD)])[rank]
        for of, tensor in enumerate(whole)
    ]
    assert_bits(memory, torch.cat(parts))


@pytest.mark.parametrize("rows", [4, 300_000])
@on_shm_ranks(WORLD)
def test_a_list_that_holds_an_element_twice(rank: int, rows: int) -> None:
    """It is summed once."""
    memory = values(rank, rows, torch.float32)
    parts = [memory[: rows - 1], memory[1:]]
    backend_of().allreduce_coalesced(parts, dist.AllreduceCoalescedOptions()).wait()
    assert_bits(memory, total(of_all(WORLD, rows, torch.float32)))
