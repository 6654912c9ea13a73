"""ZeroRedundancyOptimizer trains as one process does, and as torch's class; the same bits on all
ranks, in memory that the ranks of a host have once."""

import ctypes
import gc
import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, AdamW

from harness.models import Shapes, batch, mlp
from harness.on_ranks import on_gloo_ranks, on_shm_ranks
from harness.training import Training, alone, assert_equal_parameters
from zero.ranks import Zero, assert_trains_as_one_process, sharded

STAGES = (1, 2)
STEPS = 5


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_shm_ranks("world")
def test_equals_one_process(rank: int, world: int) -> None:
    for stage in STAGES:
        for make in (mlp, Shapes):
            for options in ({}, {"host_params": False}, {"placement": "whole"}):
                ours = sharded(make, AdamW, stage, options, lr=0.01)
                assert_trains_as_one_process(ours, alone(make, AdamW, lr=0.01))


@on_gloo_ranks(2)
def test_equals_one_process_over_gloo(rank: int) -> None:
    """Parameters are private, gradients scattered."""
    for stage in STAGES:
        ours = sharded(Shapes, AdamW, stage, lr=0.01)
        assert not ours.optimizer._cores[0].shares_parameters
        assert_trains_as_one_process(ours, alone(Shapes, AdamW, lr=0.01))


@on_gloo_ranks(2)
def test_equals_torchs_class(rank: int) -> None:
    model = mlp()
    optimizer = TorchZero(model.parameters(), SGD, lr=0.1, momentum=0.9)
    theirs = Training(model, TorchDDP(model), optimizer, rank, dist.get_world_size())
    trainings = [theirs, *(sharded(mlp, SGD, stage, lr=0.1, momentum=0.9) for stage in STAGES)]
    for step in range(STEPS):
        for training in trainings:
            training.train(step)
            assert_equal_parameters(training.model, theirs.model)


@on_shm_ranks(2)
def test_stage_1_wherever_gradients_are_averaged(rank: int) -> None:
    """In torch's DDP, made before or after; and where every rank has all rows."""
    for wrapped_first in (True, False):
        model = mlp()
        net = TorchDDP(model) if wrapped_first else model
        optimizer = Zero(model.parameters(), AdamW, lr=0.01)
        if not wrapped_first:
            with trireme.writing(optimizer):  # torch's class brings rank 0's values
                net = TorchDDP(model)
        ours = Training(model, net, optimizer, rank, dist.get_world_size())
        assert_trains_as_one_process(ours, alone(mlp, AdamW, lr=0.01))
    model = Shapes()
    ours = Training(model, model, Zero(model.parameters(), AdamW, lr=0.01))
    assert_trains_as_one_process(ours, alone(Shapes, AdamW, lr=0.01))


@on_shm_ranks(2)
def test_gradients_with_a_lazy_minus(rank: int) -> None:
    ours, one = sharded(mlp, SGD, 1, lr=0.5), alone(mlp, SGD, lr=0.5)
    for training in (ours, one):
        for parameter in training.model.parameters():
            parameter.grad = torch._neg_view(torch.full_like(parameter, 2.0))
        training.optimizer.step()
    assert_equal_parameters(ours.model, one.model)


@on_shm_ranks(2)
def test_a_module_and_its_optimizer_made_in_either_order(rank: int) -> None:
    model = mlp()
    optimizer = Zero(model.parameters(), AdamW, lr=0.01)
    ours = Training(model, trireme.DistributedDataParallel(model), optimizer, rank, 2)
    assert_trains_as_one_process(ours, alone(mlp, AdamW, lr=0.01))


@on_shm_ranks(3)
def test_ranks_start_from_rank_0(rank: int) -> None:
    for options in ({}, {"host_params": False}):
        model = mlp()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
        Zero(model.parameters(), AdamW, **options)
        assert_equal_parameters(model, mlp())


@on_shm_ranks(3)
def test_ranks_of_a_host_have_the_parameters_once(rank: int) -> None:
    model = Shapes()
    (core,) = Zero(model.parameters(), AdamW, stage=2)._cores
    for parameter, shard, ranges in zip(
        model.parameters(), core.shards(), core.plan(), strict=True
    ):
        begin, numel = ranges[rank]
        assert shard.numel() == numel
        # A storage of its own, so that what is saved of it is the shard and not the model.
        assert shard.untyped_storage().nbytes() == numel * shard.element_size()
        if numel > 0:
            assert shard.data_ptr() == parameter.data_ptr() + begin * shard.element_size()
            shard.detach().fill_(1 + rank)
    dist.barrier()
    for parameter, ranges in zip(model.parameters(), core.plan(), strict=True):
        for owner, (begin, numel) in enumerate(ranges):
            assert torch.all(parameter.flatten()[begin : begin + numel] == 1 + owner)


@on_shm_ranks(2)
def test_private_parameters_are_private(rank: int) -> None:
    model = mlp()
    Zero(model.parameters(), AdamW, host_params=False)
    with torch.no_grad():
        model[0].weight.fill_(rank)
    dist.barrier()
    assert torch.all(model[0].weight == rank)


def _mapped() -> list[str]:
    """What this process has mapped of Trireme's shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[0] for line in lines if "memfd:trireme" in line)


def _use(stage: int) -> Training:
    ours = sharded(mlp, AdamW, stage)
    for step in range(3):  # from the second on gradients are a stream
        ours.train(step)
    ours.optimizer.clip_grad_norm_(1.0)
    ours.optimizer.consolidate_state_dict()
    return ours


@on_shm_ranks(2)
def test_what_is_deleted_gives_its_memory_back(rank: int) -> None:
    for stage in STAGES:
        _use(stage)  # what the group makes once, it keeps
        gc.collect()
        before = _mapped()
        ours = _use(stage)
        assert len(_mapped()) > len(before)
        kept = next(ours.model.parameters())
        value = kept.detach().clone()
        del ours
        gc.collect()
        assert torch.equal(kept, value)  # lives as long as somebody holds a parameter
        del kept
        gc.collect()
        assert _mapped() == before


@on_shm_ranks(2)
def test_parameters_are_free_for_another_optimizer_when_theirs_is_gone(rank: int) -> None:
    model = mlp()
    for stage in (2, 1, 2):
        optimizer = Zero(model.parameters(), SGD, stage=stage, lr=0.1)
        with pytest.raises(ValueError, match="another ZeroRedundancyOptimizer"):
            Zero([model[0].weight], SGD, lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
        gc.collect()
    one = mlp()
    plain = SGD(one.parameters(), lr=0.1)
    for _ in range(3):
        plain.zero_grad()
        one(torch.ones(2, 6)).sum().backward()
        plain.step()
    assert_equal_parameters(model, one)


def _resident_bytes(tensor: torch.Tensor) -> int:
    """Tells how much of its memory is there, without touching it."""
    page = mmap.PAGESIZE
    begin = tensor.data_ptr() // page * page
    length = tensor.data_ptr() + tensor.nbytes - begin
    pages = (ctypes.c_ubyte * (-(-length // page)))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    status = mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), pages)
    assert status == 0, ctypes.get_errno()
    return sum(entry & 1 for entry in pages) * page


def _wide() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(512, 8192, bias=False), nn.Linear(8192, 512, bias=False))


@on_shm_ranks(2)
def test_of_a_gradient_only_what_is_owned_takes_memory(rank: int) -> None:
    """Gradients are larger than the rings through which they go."""
    model, one = _wide(), _wide()
    optimizer = Zero(model.parameters(), SGD, stage=2, lr=0.1)
    plain = SGD(one.parameters(), lr=0.1)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for step in range(4):
        optimizer.zero_grad(set_to_none=step != 3)
        plain.zero_grad()
        rows = batch(step, rows=2, width=512)
        model(rows[rank : rank + 1]).square().mean().backward()
        one(rows).square().mean().backward()
        norm = optimizer.clip_grad_norm_(0.1)
        right = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        torch.testing.assert_close(norm, right, rtol=1e-3, atol=0)  # 8 million squares
        optimizer.step()
        plain.step()
        assert_equal_parameters(model, one)
        if step == 0:
            continue
        there = sum(_resident_bytes(parameter.grad) for parameter in model.parameters())
        # Huge pages reach over the borders of shards.
        assert whole / 2 <= there <= whole / 2 + 4 * 2**21, (step, there, whole)
