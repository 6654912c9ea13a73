"""A rank fails where fully_shard gathers over Gloo: the others raise soon, and say who it was and
which unit they were waiting for. The group must then be rebuilt.
"""

from __future__ import annotations

import functools
import resource

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from fsdp.ranks import own, sharded
from harness.faults import break_it, raises
from harness.memory import mapped_bytes
from harness.models import mlp
from harness.on_ranks import AGES_S, on_ranks

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


@on_gloo_ranks(2)
def test_no_memory_for_a_unit(rank: int) -> None:
    """The rank says how much of what it needed; the other one is told."""
    width = 4096  # 64 MiB, more than the heap keeps
    model = trireme.fully_shard(nn.Linear(width, width, bias=False))
    x = torch.ones(1, width)
    if rank == 1:
        taken = mapped_bytes()
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
