"""Layers and their optimizer state go from rank to rank: what the core does for the trainer."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trireme import _C
from trireme._core.group_communicator import communicator_of

from harness.faults import raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks

TEXT = "[pipetransformer] held elsewhere"


def made(number: int) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4) + number)
    count = torch.tensor(number)
    state = {"weight.exp_avg": torch.full((3, 4), number + 0.5), "weight.step": torch.tensor(3.0)}
    return {"tensors": [("weight", weight), ("count", count)], "state": list(state.items())}


def move(number: int, before: list[int], after: list[int], layer: dict[str, Any]) -> Any:
    return _C.LayerMove(name=str(number), before=before, after=after, **layer)


@on_shm_and_gloo_ranks(2)
def test_a_layer_moves_with_its_state_and_comes_back(rank: int) -> None:
    ranks = communicator_of(dist.group.WORLD)
    layers = [made(0), made(1)]
    parameters = [layer["tensors"][0][1] for layer in layers]
    other = layers[1 - rank]
    _C.free_memory([tensor for _, tensor in other["tensors"]], TEXT)
    assert not _C.has_memory(parameters[1 - rank]) and _C.has_memory(parameters[rank])
    assert parameters[1 - rank].shape == (3, 4)
    other["state"], layers[rank]["values"] = [], f'{{"lr": {rank}}}'
    moves = [move(n, [n], [0, 1], layer) for n, layer in enumerate(layers)]
    moved = _C.move_layers(moves, plan="1 x 2 of 2 layers", ranks=ranks)
    assert moved[rank] is None
    found, expected = moved[1 - rank], made(1 - rank)
    assert found.values == f'{{"lr": {1 - rank}}}'
    for got, wanted in ((found.state, expected["state"]), (other["tensors"], expected["tensors"])):
        assert [name for name, _ in got] == [name for name, _ in wanted]
        assert all(torch.equal(one, two) for (_, one), (_, two) in zip(got, wanted, strict=True))
    assert parameters[1 - rank].requires_grad and parameters[1 - rank].is_leaf
    parameters[1 - rank].square().sum().backward()
    with raises(ValueError, "ranks that move layers differently: 'the plan 0' on rank 0"):
        _C.move_layers(moves, plan=str(rank), ranks=ranks)


def test_a_tensor_without_memory_keeps_what_shares_it() -> None:
    whole = torch.arange(6.0)
    part = whole[2:5]
    _C.free_memory([part], TEXT)
    assert torch.equal(whole, torch.arange(6.0))
    assert part.shape == (3,) and not _C.has_memory(part)
    if torch.__version__ >= "2.12":
        with pytest.raises(RuntimeError, match="held elsewhere"):
            part.sum()


@on_shm_ranks(3, dying=[2])
def test_a_rank_killed_in_a_move_is_named_within_a_second(rank: int) -> None:
    ranks = communicator_of(dist.group.WORLD)
    layers = [made(number) for number in range(3)]
    for number, layer in enumerate(layers):
        if number != rank:
            layer["state"] = []
    moves = [move(n, [n], [0, 1, 2], layer) for n, layer in enumerate(layers)]
    if rank == 2:
        # Behind a first move, so that the groups of layers are there.
        _C.move_layers(moves[:1], plan="all", ranks=ranks)
        os.kill(os.getpid(), signal.SIGKILL)
    _C.move_layers(moves[:1], plan="all", ranks=ranks)
    begin = time.perf_counter()
    with raises(dist.DistBackendError, "rank 2"):
        _C.move_layers(moves, plan="all", ranks=ranks)
    assert time.perf_counter() - begin < 5  # 1 s where ranks have their cores
