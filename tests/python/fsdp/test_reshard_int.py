"""reshard_after_forward=<int>: from forward until the backward that averages is over, a part of the
ranks have all parameters between them, and gather from each other only.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD, AdamW
from trireme._core.meshes import timeout_of
from trireme._fsdp.mesh import FsdpMesh, _neighbours_in

from fsdp.models import Checkpointed, Skipping, frozen_front, shard_list
from fsdp.ranks import (
    assert_locals,
    evaluate,
    has_memory,
    pair,
    shard_layers,
    sharded,
    sharded_in,
    torch_pair,
    train_both,
    train_by_rank,
)
from harness.faults import break_it, message_of, raises
from harness.joins import OPTIONS, by_torchs_ddp, inputs, loop
from harness.meeting import say, stay_until
from harness.models import mlp
from harness.on_ranks import AGES_S, on_gloo_ranks, on_shm_ranks
from harness.recording import needs_recording, recording
from harness.training import scale

WORLD = 4
AMONG_TWO: dict[str, Any] = {"reshard_after_forward": 2}


@on_gloo_ranks(WORLD)
def test_as_torch(rank: int) -> None:
    """Uneven shards, casts, frozen parameters; evaluations, and micro-batches without averaging."""
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
        (mlp, {}),
        (mlp, {"mp_policy": bf16}),
        (frozen_front, {}),
    ]
    for make, options in cases:
        ours, theirs = torch_pair(make, AdamW, lr=0.01, **AMONG_TWO, **options)
        for step in range(3):
            for training in (ours, theirs):
                training.optimizer.zero_grad()
                if step == 1:
                    evaluate(training, 9)
                training.backward(step, sync=False)
                training.backward(step + 1)
            assert_locals(ours.model, theirs.model)
            for training in (ours, theirs):
                training.optimizer.step()
        assert_locals(ours.model, theirs.model)


class Wires:
    """What goes between neighbours, of all models that this rank makes from now on."""

    def __init__(self) -> None:
        self.wires: list[Any] = []
        make = FsdpMesh.neighbours

        def recorded(mesh: FsdpMesh, count: int) -> Any:
            made = make(mesh, count)
            if made is None:
                return None
            self.wires.append(recording(made))
            return self.wires[-1]

        FsdpMesh.neighbours = recorded  # type: ignore[method-assign]

    def gathers(self) -> int:
        """Since the last call."""
        count = sum(len(wire.records) for wire in self.wires)
        for wire in self.wires:
            wire.clear()
        return count


def counted(ours: Any, wires: Wires, *, sync: bool = True) -> tuple[int, int]:
    """Counts, in a forward and a backward, gathers between neighbours."""
    ours.model.set_requires_gradient_sync(sync)
    loss = ours.loss(0)
    assert not any(has_memory(ours.model)) and all(sharded_in(ours.model))
    forward = wires.gathers()
    loss.backward()
    ours.model.set_requires_gradient_sync(True)
    assert not any(has_memory(ours.model)) and all(sharded_in(ours.model))
    return forward, wires.gathers()


@needs_recording
@on_gloo_ranks(WORLD)
def test_when_pieces_are_gathered(rank: int) -> None:
    """Always after all ranks have been asked once, until parameters are written or averaged."""
    wires = Wires()
    ours, one = pair(mlp, options=AMONG_TWO)
    mesh = ours.model[0]._get_fsdp_state().mesh
    for group in (mesh.gather_group, _neighbours_in(mesh.shard_group, 2)):
        assert timeout_of(group) == timeout_of(dist.group.WORLD) == timedelta(seconds=30)
    for _ in range(2):  # while the order of units is learned, and later
        assert counted(ours, wires) == (0, 3)
        ours.optimizer.step()
    assert counted(ours, wires, sync=False) == (0, 3)
    assert counted(ours, wires, sync=False) == (3, 3)
    assert counted(ours, wires) == (3, 3)
    assert counted(ours, wires) == (0, 3)  # given up when gradients were averaged
    ours.optimizer.step()
    with torch.inference_mode():
        evaluate(ours, 9)
    assert wires.gathers() == 0
    assert counted(ours, wires) == (3, 3)
    ours.optimizer.step()
    ours.model[0].unshard()
    ours.model[0].reshard()
    assert counted(ours, wires) == (1, 3)

    evaluate(ours, 9)  # what was kept for later passes is not that any more
    scale(ours.model)
    wrong = "was written after a forward and before optimizer.step(), while ranks kept pieces of it"
    with raises(RuntimeError, "[fully_shard] parameter '0.weight'", wrong):
        ours.loss(0)
    with trireme.writing(ours.model):
        scale(ours.model, 0.5)
    wires.gathers()
    assert counted(ours, wires) == (0, 3)

    ours, one = pair(mlp, options=AMONG_TWO)
    copied = copy.deepcopy(ours.model)
    train_both(ours, one, 0)
    wires.gathers()
    ours.model.set_reshard_after_forward(True)
    train_both(ours, one, 1)
    assert wires.gathers() == 0
    loss = copied(torch.ones(2, 6)).sum()
    assert wires.gathers() == 0
    loss.backward()
    assert wires.gathers() == 3


@needs_recording
@on_gloo_ranks(WORLD)
def test_orders_of_units(rank: int) -> None:
    """Ranks that use different units, units that compute again in a backward of their own, ranks
    without inputs, a mesh of two dimensions."""
    ways = [("abc", "abc", "cba", "a"), ("b", "cs", "a", "s"), ("abab", "ba", "c", "abc")]
    ours, one = pair(Skipping, AdamW, options=AMONG_TWO, lr=0.01)
    for step, way in enumerate((ways[2], *ways)):
        train_by_rank(ours, one, step, way)
    ours, one = pair(lambda: Checkpointed(True), shard=shard_list, options=AMONG_TWO)
    for step in range(2):
        train_both(ours, one, step, step + 1)
    counts = (3, 1, 2, 0)
    right = by_torchs_ddp(rank, counts, divide_by_initial_world_size=True)
    model = shard_layers(mlp(), **AMONG_TWO)
    optimizer = SGD(model.parameters(), **OPTIONS)
    with Join([model], optimizer=optimizer):
        loop(model, optimizer, inputs(rank, counts[rank]), zero_first=True)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), right[name])
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
    wires = Wires()
    replicated = sharded(mlp, options={"mesh": mesh, **AMONG_TWO})
    alike = sharded(mlp)
    for step in range(2):
        for training in (replicated, alike):
            training.train(step)
    assert wires.gathers() == 2 * 3
    assert_locals(replicated.model, alike.model)


@on_shm_ranks(WORLD)
def test_arguments_and_where_ranks_share_memory(rank: int) -> None:
    """Over Gloo it is the same with gathers."""
    for number in (0, -2, 3, 8):
        with raises(ValueError, f"got reshard_after_forward={number}, expected a factor of 4"):
            trireme.fully_shard(mlp(), reshard_after_forward=number)
    for number, shown in ((1, False), (2, True), (4, True)):
        ours, one = pair(mlp, options={"reshard_after_forward": number})
        for step in range(2):
            ours.loss(step)
            assert all(sharded_in(ours.model)) == shown
            train_both(ours, one, step)


def error_of_backward(loss: torch.Tensor) -> str:
    try:
        loss.backward()
    except dist.DistBackendError as error:
        return message_of(error)
    return "no error"


@on_gloo_ranks(WORLD, timeout=40, patience_s=AGES_S, dying=(1,))
def test_a_rank_dies_before_its_neighbour_gathers_from_it(rank: int) -> None:
    ours = sharded(mlp, options=AMONG_TWO)
    ours.train(0)
    loss = ours.loss(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = error_of_backward(loss)
    gather = "all_gather of unit 4.weight .. 4.bias (from ranks 0 to 1) failed"
    expected = gather if rank == 0 else "failed"
    assert said.startswith("[comm] ") and expected in said, said


@on_gloo_ranks(WORLD, timeout=40, patience_s=AGES_S)
def test_a_rank_raises_before_its_neighbour_gathers_from_it(rank: int) -> None:
    """Without averaging, so that nothing but a gather waits for it."""
    ours = sharded(mlp, options=AMONG_TWO)
    ours.train(0)
    ours.model.set_requires_gradient_sync(False)
    if rank == 1:
        ours.model[4].register_full_backward_hook(break_it)
    loss = ours.loss(1)
    if rank == 1:
        with pytest.raises(ArithmeticError, match="the data of this rank"):
            loss.backward()
        stay_until("read")
    elif rank == 0:
        said = error_of_backward(loss)
        assert "unit 0.weight .. 0.bias (from ranks 0 to 1) was given up" in said, said
        assert "a backward was abandoned: ArithmeticError: " in said, said
        assert "(rank 1 of 4)" in said, said
        say("read")
    else:
        loss.backward()  # with those that are there
