"""A rank fails, dies or does not come where fully_shard gathers over Gloo: the others raise soon,
and say who it was and which unit they were waiting for. The group must then be rebuilt.
"""

from __future__ import annotations

import functools
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from ddp.ranks import (
    AGES_S,
    break_it,
    kill_this_rank,
    mlp,
    on_ranks,
    raises,
    say,
    set_timeout,
    stay_until,
)
from fsdp.ranks import own, sharded

on_gloo_ranks = functools.partial(on_ranks, backend="gloo", timeout=40, patience_s=AGES_S)


@pytest.mark.parametrize("steps_before", [0, 2])
@on_gloo_ranks(3)
def test_a_forward_that_raises_on_one_rank(rank: int, steps_before: int) -> None:
    """While the order of units is learned, and later."""
    ours = sharded(mlp)
    for step in range(steps_before):
        ours.train(step)
    if rank == 1:
        ours.model[2].register_forward_pre_hook(break_it)
        with pytest.raises(ArithmeticError, match="the data of this rank"):
            ours.loss(5)
    reason = "a forward was abandoned: ArithmeticError: the data of this rank are broken"
    with raises(dist.DistBackendError, reason, "(rank 1 of 3)"):
        ours.loss(5).backward()
    assert all(own(param).isfinite().all() for param in ours.model.parameters())
    with raises(dist.DistBackendError, "initialise it again"):
        ours.loss(6)


@pytest.mark.parametrize("moment", ["forward", "backward"])
@on_gloo_ranks(3, dying=(1,))
def test_a_rank_is_killed(rank: int, moment: str) -> None:
    """The error says which unit was gathered, or which bucket of gradients was reduced."""
    ours = sharded(mlp)
    ours.train(0)
    ours.train(1)
    if rank == 1 and moment == "forward":
        kill_this_rank()
    if rank == 1:
        ours.model[2].register_full_backward_hook(kill_this_rank)
    with raises(dist.DistBackendError, "0.weight", f"(rank {rank} of 3)"):
        ours.train(2)


@on_gloo_ranks(2)
def test_a_rank_that_does_not_come(rank: int) -> None:
    """To the first forward, in which ranks say what they need."""
    dist.barrier()
    set_timeout(4)  # what is made from now on takes it over
    ours = sharded(mlp)
    if rank == 1:
        return stay_until("done")
    with raises(dist.DistBackendError, "all_gather of units that ranks need", "rank 1"):
        ours.loss(0)
    say("done")


@on_gloo_ranks(2)
def test_no_memory_for_a_unit(rank: int) -> None:
    """The rank says how much of what it needed; the other one is told."""
    width = 4096  # 64 MiB, more than the heap keeps
    model = trireme.fully_shard(nn.Linear(width, width, bias=False))
    x = torch.ones(1, width)
    if rank == 1:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20), limits[1]))
        try:
            with pytest.raises(
                torch.OutOfMemoryError, match="got no memory for 67108864 bytes of unit weight"
            ):
                model(x)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        return
    with raises(dist.DistBackendError, "got no memory for 67108864 bytes", "(rank 1 of 2)"):
        model(x)
