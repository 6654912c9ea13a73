"""fully_shard where ranks are on several hosts: parameters once per host, what other hosts wrote
brought there before it is read.

Hosts are pretended by ``host_partition``; ranks that say different texts do not share memory.
"""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.optim import AdamW

from fsdp.ranks import (
    assert_locals,
    assert_parts,
    evaluate,
    own,
    pair,
    rows_of,
    shard_layers,
    torch_pair,
    train_both,
)
from harness.faults import raises
from harness.meeting import say, stay_until
from harness.models import Shapes, Tied, mlp
from harness.pretended_hosts import LAYOUTS, on_hosts
from harness.training import alone, scale

BF16 = torch.bfloat16


# --- Training ------------------------------------------------------------------------------------


def as_one_process(rank: int, world: int) -> None:
    """Uneven rows, fewer rows than ranks, no elements, no dimensions, four dtypes, tied ones."""
    for make in (mlp, Shapes, Tied):
        ours, one = pair(make)
        assert_parts(ours, one)
        for step in range(2):
            train_both(ours, one, step)
            for _ in range((rank + step) % 3):
                got, expected = evaluate(ours, 9), evaluate(one, 9)
                torch.testing.assert_close(got[:, :3], expected[:, :3])  # the rest of Shapes: bf16
        evaluate(ours, 9)  # who has left cannot say that it has written
    frozen, one = pair(mlp, AdamW, lr=0.01)
    for training in (frozen, one):
        training.model[0].weight.requires_grad_(False)
    for step in range(2):
        train_both(frozen, one, step, step + 5)


def along_another_dimension(rank: int, world: int) -> None:
    def shard(model: nn.Module) -> None:
        shard_layers(model, shard_placement_fn=lambda param: Shard(param.ndim - 1))

    ours, one = pair(mlp, shard=shard)
    for step in range(2):
        train_both(ours, one, step)


def as_torch(rank: int, world: int) -> None:
    """Over Gloo; parameters, gradients and dtypes."""
    rounded = {"rtol": 2**-7, "atol": 1e-3}
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, torch.float32)):
        ours, theirs = torch_pair(mlp, mp_policy=policy)
        tolerance: dict[str, Any] = rounded if policy.param_dtype else {}
        for step in range(3):
            for training in (ours, theirs):
                training.optimizer.zero_grad()
                training.model(rows_of(step, training)).float().square().mean().backward()
            assert_locals(ours.model, theirs.model, **tolerance)
            for training in (ours, theirs):
                training.optimizer.step()


PROGRAMS = {
    "2x2": [as_one_process, along_another_dimension, as_torch],
    "1+3": [as_one_process, as_torch],
    "apart": [as_one_process],
}


@pytest.mark.parametrize("layout", PROGRAMS)
def test_training(layout: str) -> None:
    on_hosts(layout, each_of, PROGRAMS[layout])


def each_of(rank: int, world: int, programs: list[Any]) -> None:
    for program in programs:
        program(rank, world)


# --- Reading and writing -------------------------------------------------------------------------


def before_the_first_forward(rank: int, world: int, layout: str) -> None:
    """A unit may be unsharded by itself; two hosts have the same, and ranks of one share it."""
    model = shard_layers(mlp())
    for number, param in enumerate(model.parameters()):
        own(param).fill_(10 * number + rank)
    for unit in (model[0], model[2], model[4]):
        unit.unshard()
    for number, param in enumerate(model.parameters()):
        owners = torch.arange(len(param)) // -(-len(param) // world)
        assert torch.equal(param[:, 0] if param.ndim > 1 else param, 10.0 * number + owners)
    dist.barrier()
    if rank == world - 1:
        model[0].bias.detach()[0] = 99.0  # behind everybody's back, to see whose memory it is
    dist.barrier()
    told: list[Any] = [None] * world
    dist.all_gather_object(told, model[0].bias[0].item())
    assert told == [99.0 if host == LAYOUTS[layout][-1] else 10.0 for host in LAYOUTS[layout]]


def writes(rank: int, world: int) -> None:
    """Outside of steps; whole states out and in."""
    ours, one = pair(mlp, AdamW, lr=0.01)
    for step in range(3):
        train_both(ours, one, step)
        for training in (ours, one):
            with trireme.writing(training.model):
                scale(training.model, 0.9)
        if rank == step % world:
            stay_until(*(f"{peer} reads {step}" for peer in range(world) if peer != rank))
        say(f"{rank} reads {step}")
        torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))
    whole = get_model_state_dict(ours.model, options=StateDictOptions(full_state_dict=True))
    for name, value in whole.items():
        torch.testing.assert_close(value, one.model.state_dict()[name])
    kept = {name: value.clone() for name, value in ours.model.state_dict().items()}
    for training in (ours, one):
        with trireme.writing(training.model):
            scale(training.model, 3.0)
    ours.model.load_state_dict(kept)
    scale(one.model, 1 / 3)
    train_both(ours, one, 5)


def checkpoints(rank: int, world: int, folder: str) -> None:
    ours, one = pair(mlp)
    train_both(ours, one, 0)
    trireme.save_checkpoint(folder, ours.model, ours.optimizer)
    train_both(ours, one, 1)
    trireme.load_checkpoint(folder, ours.model, ours.optimizer)
    again = alone(mlp, type(one.optimizer), lr=0.1, momentum=0.9)
    again.train(0)
    train_both(ours, again, 1)


def memory_of_a_host(rank: int, world: int) -> None:
    """All parameters in the dtype that is read; in another one of their own, shards."""
    models = []
    for param_dtype, mebibytes in ((None, 4), (BF16, 2)):
        gc.collect()  # what an earlier model mapped does not go meanwhile
        before = mapped_mebibytes()
        models.append(nn.Linear(1024, 1024, bias=False))
        trireme.fully_shard(models[-1], mp_policy=MixedPrecisionPolicy(param_dtype, torch.float32))
        assert mebibytes <= mapped_mebibytes() - before < mebibytes + 0.5
        dist.barrier()


def mapped_mebibytes() -> float:
    """Counts the shared memory that this rank maps."""
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "trireme" in line and ".so" not in line:
            begin, end = line.split()[0].split("-")
            mapped += int(end, 16) - int(begin, 16)
    return mapped / 2**20


def test_reading_and_writing(tmp_path: Any) -> None:
    on_hosts("1+3", reading_and_writing, "1+3", str(tmp_path / "checkpoint"))


def reading_and_writing(rank: int, world: int, layout: str, folder: str) -> None:
    before_the_first_forward(rank, world, layout)
    memory_of_a_host(rank, world)
    writes(rank, world)
    checkpoints(rank, world, folder)


# --- What goes wrong -----------------------------------------------------------------------------


def refused(rank: int, world: int) -> None:
    """One host has no memory to share: no rank goes on alone."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = nn.Sequential(nn.Linear(300, 300))
    dist.all_reduce(torch.ones(100_000))  # with rings of their own
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    with raises(RuntimeError, "[fully_shard]", "rank 0 says: ", "parameters"):
        trireme.fully_shard(model)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    ours, one = pair(mlp)
    train_both(ours, one, 0)


def test_memory_that_one_host_refuses() -> None:
    on_hosts("1+3", refused)
