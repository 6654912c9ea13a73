"""States of models that tensor parallelism and fully_shard have cut: made, cast, copied, saved."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import AdamW

from fsdp.model_parallel import (
    Language,
    assert_parts,
    backward,
    build,
    grid,
    loss_of,
    part_of,
    sgd,
    words,
)
from fsdp.ranks import local, run_programs
from harness.on_ranks import BACKENDS


def from_meta(rank: int) -> None:
    """Cut and sharded without memory, then filled by each rank for itself."""
    mesh, one = grid(), Language()
    with torch.device("meta"):
        ours = build(mesh)
    ours.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in ours.named_parameters():
            param.to_local().copy_(part_of(one.get_parameter(name), param))
    backward(ours, mesh, 0)
    loss_of(one, words(0)).backward()
    assert_parts(ours, one, grads=True)


def cast_afterwards(rank: int) -> None:
    mesh = grid()
    ours, one = build(mesh).double(), Language().double()
    backward(ours, mesh, 0)
    loss_of(one, words(0)).backward()
    assert ours.block.up.weight.grad.dtype == torch.float64
    assert_parts(ours, one, grads=True)


def copied(rank: int) -> None:
    """A copy trains like the original, and apart from it."""
    mesh = grid()
    ours, one = build(mesh), Language()
    backward(ours, mesh, 0)
    other = copy.deepcopy(ours)
    for model in (ours, other):
        optimizer = sgd(model)
        optimizer.zero_grad()
        backward(model, mesh, 1)
        optimizer.step()
    own = sgd(one)
    loss_of(one, words(1)).backward()
    own.step()
    for model in (ours, other):
        assert_parts(model, one)


def saved_by_torch(rank: int) -> None:
    """Its DCP saves and loads model and optimizer; training goes on alike."""
    mesh = grid()

    def trained(step: int) -> tuple[Any, Any]:
        model = build(mesh)
        optimizer = AdamW(model.parameters(), lr=0.1)
        backward(model, mesh, step)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def parts(model: Any, optimizer: Any) -> dict[str, Any]:
        state, optim_state = get_state_dict(model, optimizer)
        return {"model": state, "optimizer": optim_state}

    first, second = trained(0), trained(3)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(parts(*first), checkpoint_id=folder[0])
    state = parts(*second)
    dcp.load(state, checkpoint_id=folder[0])
    model_state, optim_state = state["model"], state["optimizer"]
    set_state_dict(*second, model_state_dict=model_state, optim_state_dict=optim_state)
    for model, optimizer in (first, second):
        backward(model, mesh, 4)
        optimizer.step()
    for mine, again in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(local(mine), local(again))


@BACKENDS
def test_states(backend: str) -> None:
    run_programs(backend, 4, from_meta, cast_afterwards, copied, saved_by_torch)
