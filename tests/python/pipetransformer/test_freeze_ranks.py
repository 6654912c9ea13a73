"""Freeze where ranks train together: bytes, state, ranks that go apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.optim import AdamW

import fsdp.ranks
import zero.ranks
from harness.faults import RANKLESS_FORM, raises
from harness.models import batch
from harness.on_ranks import on_ranks, on_shm_ranks
from harness.training import Training, alone
from pipeline.ranks import tanh_layers, tied_layers


def layers() -> nn.Module:
    return tanh_layers(12)


def ddp(make: Any, optimizer: Any, **defaults: Any) -> Training:
    model = make()
    net = trireme.DistributedDataParallel(model)
    optimizer = optimizer(model.parameters(), **defaults)
    return Training(model, net, optimizer, dist.get_rank(), dist.get_world_size())


def zero_1(make: Any, optimizer: Any, **defaults: Any) -> Training:
    return zero.ranks.sharded(make, optimizer, 1, **defaults)


def zero_2(make: Any, optimizer: Any, **defaults: Any) -> Training:
    return zero.ranks.sharded(make, optimizer, 2, **defaults)


STRATEGIES = (ddp, zero_1, zero_2, fsdp.ranks.sharded)


def reduced_bytes(training: Training) -> float:
    """Of the last step; of ZeRO 2 by its core."""
    if hasattr(training.net, "last_step"):
        return training.net.last_step()["reduced_bytes"]
    return sum(core.last_step()["reduced_bytes"] for core in training.optimizer._cores)


@on_shm_ranks(2)
def test_nothing_of_a_frozen_layer_crosses_from_the_second_step_on(rank: int) -> None:
    for make in STRATEGIES:
        training = make(layers, AdamW, lr=0.01)
        freeze = trireme.Freeze(training.net, rule="schedule", optimizer=training.optimizer)
        for number in range(3):
            training.train(number)
        freeze.advance()
        for number in range(2):
            training.train(number)
        found = reduced_bytes(training)
        assert freeze.frozen == 2

        def frozen_before() -> nn.Module:
            model = layers()
            for layer in model[:4]:
                layer.requires_grad_(False)
            return model

        other = make(frozen_before, AdamW, lr=0.01)
        for number in range(3):
            other.train(number)
        assert found == reduced_bytes(other) > 0, make


@on_shm_ranks(2)
def test_state_of_frozen_layers_is_freed_on_each_rank(rank: int) -> None:
    for make in STRATEGIES:
        training = make(layers, AdamW, lr=0.01)
        freeze = trireme.Freeze(training.net, rule="schedule", optimizer=training.optimizer)
        training.train(0)
        optimizer = getattr(training.optimizer, "optim", training.optimizer)
        before = len(optimizer.state)
        freeze.advance()
        assert len(optimizer.state) == before * 4 // 6, make
        training.train(1)
        assert len(optimizer.state) == before * 4 // 6, make
        freeze.unfreeze()
        training.train(2)
        assert len(optimizer.state) == before, make


@on_ranks(2)
def test_ranks_that_come_by_different_ways(rank: int) -> None:
    training = ddp(layers, AdamW, lr=0.01)
    freeze = trireme.Freeze(training.net, alpha=0.5, measure_every=1)
    training.train(0)
    freeze.step()
    if rank == 1:
        freeze.step()
    text = "got ranks that freeze differently: 'steps measured: 1' on rank 0, 'steps measured: 2'"
    with raises(ValueError, text, " on rank 1"):
        freeze.advance()
    assert freeze.history == []
    freeze = trireme.Freeze(training.net, rule="schedule")
    if rank == 1:
        freeze.load_state_dict(freeze.state_dict() | {"frozen": 1, "history": [1]})
    with raises(ValueError, "'frozen now: 0' on rank 0, 'frozen now: 1' on rank 1"):
        freeze.advance()
    with raises(ValueError, "'alpha=0.25' on rank 0, 'alpha=0.5' on rank 1"):
        trireme.Freeze(training.net, alpha=0.25 * (1 + rank))
    with raises(ValueError, "[freeze] got alpha -1, expected a number between 0 and 1"):
        trireme.Freeze(training.net, alpha=-1 if rank else 0.5)
    freeze = trireme.Freeze(training.net, rule=lambda point: 1 + rank)
    with raises(ValueError, "'layers that rule freezes: 1' on rank 0"):
        freeze.advance()

    def breaks(point: trireme.FreezePoint) -> int:
        if rank == 1:
            raise ArithmeticError("no idea")
        return 1

    freeze = trireme.Freeze(training.net, rule=breaks)
    try:
        freeze.advance()
    except ArithmeticError:
        assert rank == 1
    except ValueError as error:
        assert rank == 0 and "got what rank 1 cannot use" in str(error) and "no idea" in str(error)
    else:
        raise AssertionError("nothing was raised")


@on_ranks(2)
def test_what_one_rank_cannot_use(rank: int) -> None:
    training = ddp(layers, AdamW, lr=0.01)
    names = ["0", "2"] if rank == 0 else ["0", "nothing"]
    with raises(ValueError, "got 'nothing' as a layer"):
        trireme.Freeze(training.net, names)
    torchs = torch.nn.parallel.DistributedDataParallel(layers())
    with raises(ValueError, "got torch's DistributedDataParallel", form=RANKLESS_FORM):
        trireme.Freeze(torchs)


@on_shm_ranks(2)
def test_layers_of_a_pipeline_have_names_on_all_ranks(rank: int) -> None:
    options: dict[str, Any] = {"ranks": True, "loss": nn.functional.mse_loss, "chunks": 2}
    whole = tanh_layers(8)
    pipe = trireme.Pipeline(whole, **options)
    assert trireme.Freeze(pipe).state_dict()["layers"] == ["0 + 1", "2 + 3", "4 + 5", "6 + 7"]
    with raises(ValueError, "got modules as layers of a pipeline"):
        trireme.Freeze(pipe, list(whole)[::2])
    with raises(ValueError, "got layer 'x' without parameters"):
        trireme.Freeze(pipe, ["0", "x"])
    tied = trireme.Pipeline(tied_layers(8), **options)
    with raises(ValueError, "got parameter '0.weight', which is '", "as well"):
        trireme.Freeze(tied)
    freeze = trireme.Freeze(pipe, alpha=0.5, measure_every=1)
    for interval in range(3):
        pipe.step(batch(interval), target=batch(interval + 5))
        freeze.step()
        freeze.advance()
    assert freeze.frozen > 0 and freeze.frozen < 4
    own = dict(pipe.named_parameters())
    assert all(
        one.requires_grad == (int(name.split(".")[0]) // 2 >= freeze.frozen)
        for name, one in own.items()
    )


@on_shm_ranks(2)
def test_norms_of_the_average_are_those_of_one_process(rank: int) -> None:
    """Where each rank has gradients, or shards of them, of its own."""
    seen: list[list[float]] = []

    def look(point: trireme.FreezePoint) -> int:
        seen.append(point.norms)
        return point.frozen

    for make in (alone, *STRATEGIES):
        training = make(layers, AdamW, lr=0.01)
        freeze = trireme.Freeze(training.net, rule=look, measure_every=2)
        for number in range(3):
            training.optimizer.zero_grad()
            training.backward(number)
            freeze.step()
        freeze.advance()
    for norms in seen[1:]:
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(seen[0]))
