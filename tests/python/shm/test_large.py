"""Tensors beyond what 32 bits count, in bytes and in elements."""

import pytest
import torch
import torch.distributed as dist

from harness.memory import available_bytes
from harness.on_ranks import on_shm_ranks

NUMEL = 2**31 + 64  # elements of one byte each
LITTLE = 64
WORLD = 2
NEEDED = WORLD * NUMEL + 2**30  # with the rings, and what the checks take


def check(part: torch.Tensor, expected: int) -> None:
    """Both ends, both sides of 2**31, and some of everything else."""
    for at in (0, 1, 2**31 - 1, 2**31, NUMEL - 1):
        assert part[at].item() == expected, at
    assert torch.all(part[::4093] == expected)


@pytest.mark.skipif(available_bytes() < NEEDED, reason=f"takes {NEEDED >> 30} GiB of memory")
@on_shm_ranks(WORLD, timeout=100)
def test_more_than_two_to_the_31(rank: int) -> None:
    memory = torch.empty(NUMEL + LITTLE, dtype=torch.int8)
    large, little = memory[:NUMEL], memory[NUMEL:]
    (large if rank == 0 else little).fill_(rank + 1)
    dist.all_gather([large, little], large if rank == 0 else little)
    check(large, 1)
    assert torch.all(little == 2)
    dist.all_reduce(large)
    check(large, 2)
    large[-1] = 7 + rank
    dist.broadcast(large, 1)
    assert large[2**31].item() == 2
    assert large[-1].item() == 8
