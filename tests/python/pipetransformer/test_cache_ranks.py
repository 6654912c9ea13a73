"""A cache that ranks of a host share: under DDP, in a pipeline, and when a rank dies."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.faults import kill_this_rank, raises
from harness.models import batch
from harness.on_ranks import AGES_S, on_gloo_ranks, on_shm_ranks
from pipetransformer.counted_layers import (
    DATA,
    SAMPLES,
    counts,
    frozen_layers,
    layers,
    run,
)

STEPS = 12


def ids_of(step: int, rows: int = 8) -> Tensor:
    """Three steps are an epoch, and each epoch has another order."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // 3))
    return order[step % 3 * rows : (step % 3 + 1) * rows]


def targets(ids: Tensor) -> Tensor:
    return batch(1, rows=SAMPLES)[ids]


@on_shm_ranks(2)
def test_a_rank_finds_what_another_has_stored(rank: int) -> None:
    given = frozen_layers(2)
    kept = trireme.ActivationCache(SAMPLES, 1 << 16)
    prefix = trireme.CachedPrefix(given, kept, always=True)
    if rank == 0:
        own = prefix(DATA[:8], torch.arange(8))
        torch.testing.assert_close(own, run(given, DATA[:8]))
    dist.barrier()
    for layer in given:
        layer.computed()
    found = prefix(DATA[:8], torch.arange(8))
    assert [layer.computed() for layer in given] == [0, 0]
    everybody = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(everybody, found)
    assert torch.equal(*everybody)
    assert counts(kept) == ((8, 8) if rank == 0 else (8, 0))
    # One id on both ranks at once: each computes it, or finds it.
    for number in range(8, SAMPLES):
        dist.barrier()
        one = prefix(DATA[number : number + 1], torch.tensor([number]))
        torch.testing.assert_close(one, run(given, DATA[number : number + 1]))
    assert not kept.is_off
    dist.barrier()
    # Another input on one rank ends the use on both.
    if rank == 1:
        with pytest.warns(UserWarning, match=r"under id 3 than before.*\(rank 1 of 2\)"):
            prefix(DATA[3:4] + 1, torch.tensor([3]))
    dist.barrier()
    assert kept.is_off


def losses(kept: trireme.ActivationCache | None, frozen: int = 2) -> list[float]:
    """Of the mean over ranks; layers in front of DDP are frozen."""
    front, rest = layers(4)[:frozen], layers(4)[frozen:]
    for layer in front:
        layer.requires_grad_(False)
    prefix = None if kept is None else trireme.CachedPrefix(front, kept)
    ddp = trireme.DistributedDataParallel(nn.Sequential(*rest))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
    found = []
    for step in range(STEPS):
        ids = ids_of(step)[dist.get_rank() :: 2]
        hidden = run(front, DATA[ids]) if prefix is None else prefix(DATA[ids], ids)
        loss = mse_loss(ddp(hidden), targets(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(trireme.all_mean(loss.detach()).item())
    return found


@on_shm_ranks(2)
def test_ddp_trains_as_without_it(rank: int) -> None:
    kept = trireme.ActivationCache(SAMPLES, 1 << 16)
    assert losses(kept) == pytest.approx(losses(None), rel=1e-5)
    hits, misses = counts(kept)
    assert (hits, misses) == (12 * (STEPS // 3 - 1), 12)


@on_shm_ranks(2)
def test_layers_that_freeze_grow_the_prefix(rank: int) -> None:
    """Freeze in front, the wrapped rest behind; what was stored is advanced."""
    model = nn.Sequential(*layers(4))
    ddp = trireme.DistributedDataParallel(model)
    freeze = trireme.Freeze(ddp, rule="schedule")
    kept = trireme.ActivationCache(SAMPLES, 1 << 16)
    depths = []
    for _ in range(3):
        freeze.advance()
        front = list(model)[: freeze.frozen]
        prefix = trireme.CachedPrefix(front, kept, always=True)
        for layer in model:
            layer.computed()
        for step in range(3):
            ids = ids_of(step)[rank::2]
            torch.testing.assert_close(prefix(DATA[ids], ids), run(front, DATA[ids]))
        depths.append([layer.computed() - 12 for layer in front])
    assert depths == [[12, 12], [0, 0, 12], [0, 0, 0]]


@on_shm_ranks(2)
def test_a_pipeline_has_it_as_its_first_layer(rank: int) -> None:
    reached = []
    for use in (False, True):
        front, rest = layers(5)[:2], layers(5)[2:]
        for layer in front:
            layer.requires_grad_(False)
        first: nn.Module = nn.Sequential(*front)
        kept = trireme.ActivationCache(SAMPLES, 1 << 16)
        if use:
            first = trireme.CachedPrefix(front, kept, always=True)
        pipe = trireme.Pipeline(nn.Sequential(first, *rest), 4, ranks=True, loss=mse_loss)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.02)
        found = []
        for step in range(STEPS):
            ids = ids_of(step)
            optimizer.zero_grad()
            inputs: tuple[Any, ...] = (DATA[ids], ids) if use else (DATA[ids],)
            found.append(pipe.step(*inputs, target=targets(ids)).item())
            optimizer.step()
        reached.append(found)
        if use and rank == 0:
            assert counts(kept) == (SAMPLES * (STEPS // 3 - 1), SAMPLES)
        assert not use or rank == 0 or counts(kept) == (0, 0)
    assert reached[0] == pytest.approx(reached[1], rel=1e-5)


@on_gloo_ranks(2)
def test_ranks_must_share_memory(rank: int) -> None:
    with raises(ValueError, "[cache] got a group whose ranks share no memory"):
        trireme.ActivationCache(SAMPLES, 1 << 16)
    with raises(ValueError, "got 24 samples on rank 0, 25 samples on rank 1"):
        trireme.ActivationCache(SAMPLES + rank, 1 << 16)
    alone = dist.new_group([rank], use_local_synchronization=True)
    kept = trireme.ActivationCache(SAMPLES, 1 << 16, group=alone)
    trireme.CachedPrefix([nn.Tanh()], kept)(DATA[:2], torch.arange(2))
    assert counts(kept) == (0, 2)


@on_shm_ranks(2)
def test_no_such_memory(rank: int) -> None:
    with raises(ValueError, "[cache] got no memory for", "Pass fewer bytes"):
        trireme.ActivationCache(SAMPLES, 1 << 50)
    dist.barrier()


ROW = 1 << 18  # floats


@on_shm_ranks(2, dying=[1], patience_s=AGES_S)
def test_a_rank_killed_while_it_writes_leaves_misses_at_most(rank: int) -> None:
    """Whatever it has left, a row is right."""
    kept = trireme.ActivationCache(64, 64 * (4 * ROW + 64) + 4096)
    prefix = trireme.CachedPrefix([nn.Tanh()], kept, always=True)

    def row(number: int) -> Tensor:
        return torch.full((1, ROW), number / 100) + torch.arange(ROW) / ROW

    if rank == 1:

        def die() -> None:
            while kept.stats().bytes < 20 * ROW:
                pass
            kill_this_rank()

        threading.Thread(target=die, daemon=True).start()
        for number in range(64):
            prefix(row(number), torch.tensor([number]))
        threading.Event().wait()
    with raises(dist.DistBackendError, "rank 1", "has died"):
        dist.barrier()
    for number in range(64):
        found = prefix(row(number), torch.tensor([number]))
        assert torch.equal(found, row(number).tanh()), number
    hits, misses = counts(kept)
    assert hits >= 5 and hits + misses == 64 and not kept.is_off
