"""Writes to sharded parameters outside of step(): when they may be done, and refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn
from torch.optim import SGD, AdamW

from fsdp.ranks import assert_parts, evaluate, local, own, pair, sharded, sharded_in, train_both
from harness.faults import raises
from harness.meeting import until_inside
from harness.models import mlp
from harness.on_ranks import on_shm_ranks
from harness.training import scale


@on_shm_ranks(2)
def test_writes_before_the_first_forward(rank: int) -> None:
    """Initialisation and weight surgery on DTensors and on their local parts, as in torch."""

    def initialise(model: nn.Module) -> None:
        for number, param in enumerate(model.parameters()):
            nn.init.constant_(param, 0.01 * (number + 1))
        with torch.no_grad():
            model[0].weight[:, :2].mul_(3)
            model[4].bias.copy_(2 * model[4].bias)

    ours, one = pair(mlp, AdamW, lr=0.01)
    for training in (ours, one):
        initialise(training.model)
    scale(ours.model)
    scale(one.model)
    for step in range(3):
        train_both(ours, one, step)


@on_shm_ranks(2)
def test_writes_between_a_step_and_the_next_forward(rank: int) -> None:
    ours, one = pair(mlp)
    for step in range(4):
        train_both(ours, one, step)
        if step % 2 == rank:
            until_inside(1 - rank, "step gate")
        for training in (ours, one):
            scale(training.model, 0.9)
        assert_parts(ours, one)
        torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))


@on_shm_ranks(2)
def test_a_write_after_a_forward_is_refused_once(rank: int) -> None:
    """The next forward, step or writing() refuses it, naming the parameter; then all goes on."""
    parts = ("parameter '2.weight' was written after a forward", f"(rank {rank} of 2)", "writing(")
    ours, one = pair(mlp)

    def forward() -> None:
        ours.loss(1)

    def step() -> None:
        ours.optimizer.step()

    def write() -> None:
        with trireme.writing(ours.model):
            raise AssertionError("went in")

    for number, gate in enumerate((forward, step, write)):
        train_both(ours, one, number)
        ours.optimizer.zero_grad()
        ours.backward(9)
        scale(ours.model[2], 1.0)
        with raises(RuntimeError, *parts):
            gate()
    train_both(ours, one, 5)


class Renormed(nn.Module):
    """An embedding that writes its weight in forward, where rows are too long."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, max_norm=max_norm)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.embed(index)


@on_shm_ranks(2)
def test_a_write_to_unsharded_parameters_is_refused(rank: int) -> None:
    """It comes by hand after unshard(), or in a module's forward: all ranks share that memory."""
    ours, one = pair(mlp)
    train_both(ours, one, 0)
    ours.model[0].unshard()
    scale(ours.model[0], 1.0)
    with raises(RuntimeError, "parameter '0.weight' was written after a forward"):
        ours.loss(1)
    train_both(ours, one, 1)
    model = trireme.fully_shard(Renormed(max_norm=0.01))
    model(torch.arange(6))
    with raises(RuntimeError, "parameter 'embed.weight' was written after a forward"):
        model(torch.arange(6))


@on_shm_ranks(2)
def test_a_write_on_one_rank_is_refused_there(rank: int) -> None:
    """The other waits for it, and neither is harmed."""
    ours, one = pair(mlp)
    train_both(ours, one, 0)
    evaluate(ours, 9)
    if rank == 1:
        scale(ours.model[0], 1.0)
        with raises(RuntimeError, "parameter '0.weight' was written after a forward"):
            ours.loss(1)
    train_both(ours, one, 1)


def load(model: nn.Module, assign: bool = False) -> None:
    """Halves, whichever kind of tensors they are."""
    halves = {name: 0.5 * value for name, value in model.state_dict().items()}
    model.load_state_dict(halves, assign=assign)


def load_assigned(model: nn.Module) -> None:
    load(model, assign=True)


def exchange_data(model: nn.Module) -> None:
    for param in model.parameters():
        local = getattr(param, "_local_tensor", param)
        local.data = local.detach() * 0.5


def initialise(model: nn.Module) -> None:
    for param in model.parameters():
        nn.init.constant_(param, 0.02)


CHANGES: list[Callable[[nn.Module], None]] = [scale, load, exchange_data, initialise]


@on_shm_ranks(2)
def test_what_may_be_done_inside_of_writing(rank: int) -> None:
    """At any time; what is put in place of memory or parameters comes into the host's."""
    ours, one = pair(mlp)
    for step, change in enumerate([*CHANGES, *reversed(CHANGES)]):
        train_both(ours, one, step)
        evaluate(ours, 9)
        if step % 2 == rank:
            until_inside(1 - rank, "step gate")
        with trireme.writing(ours.model):
            assert all(sharded_in(ours.model))
            change(ours.model)
        change(one.model)
        assert_parts(ours, one)
        torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))


@on_shm_ranks(2)
def test_loading_needs_no_writing(rank: int) -> None:
    """load_state_dict() waits at the gate by itself, also when it assigns."""
    for change in (load, load_assigned):
        ours, one = pair(mlp)
        for step in range(3):
            train_both(ours, one, step)
            evaluate(ours, 9)
            if step == rank:
                until_inside(1 - rank, "step gate")
            change(ours.model)
            load(one.model)
            assert_parts(ours, one)
            torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))
            if change is load_assigned:  # in torch, too, no optimizer knows of them
                for training in (ours, one):
                    params = training.model.parameters()
                    training.optimizer = SGD(params, lr=0.1, momentum=0.9)


@on_shm_ranks(2)
def test_averaged_weights_in_and_out(rank: int) -> None:
    """Kept by shards, swapped in for an evaluation and out again, while one rank takes its time."""
    ours, one = pair(mlp)
    both = (ours, one)
    averages = [[local(param) for param in training.model.parameters()] for training in both]
    for step in range(3):
        outputs = []
        for training, average in zip(both, averages, strict=True):
            training.train(step)
            params = [own(param) for param in training.model.parameters()]
            for mean, value in zip(average, params, strict=True):
                mean.lerp_(value, 0.1)
            kept = [value.clone() for value in params]
            for swapped in (average, kept):
                with trireme.writing(training.model), torch.no_grad():
                    if rank == 1 and training is ours:
                        until_inside(0)  # it has written, and waits for this rank
                    for param, value in zip(training.model.parameters(), swapped, strict=True):
                        own(param).copy_(value)
                outputs.append(evaluate(training, 50))
        torch.testing.assert_close(outputs[2:], outputs[:2])
        assert not torch.equal(outputs[0], outputs[1])


@on_shm_ranks(3)
def test_writing_after_evaluations_of_some_ranks(rank: int) -> None:
    """Who has read since the step and who has not come to the same gate, as often as they like."""
    ours, one = pair(mlp)
    for step in range(4):
        train_both(ours, one, step)
        for change in (scale, load):
            if rank == step % 3:
                torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))
            with trireme.writing(ours.model):
                change(ours.model)
            change(one.model)
        if rank == (step + 1) % 3:
            torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))
        load(ours.model)
        load(one.model)
        assert_parts(ours, one)


@on_shm_ranks(2)
def test_torchs_averaged_model(rank: int) -> None:
    """An EMA of DTensors by torch's foreach function, which writes nothing of ours."""
    ours, one = pair(mlp)
    averaged = [
        [value.detach().clone() for value in training.model.parameters()]
        for training in (ours, one)
    ]
    update = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    for step in range(3):
        train_both(ours, one, step)
        for training, means in zip((ours, one), averaged, strict=True):
            update(means, [value.detach() for value in training.model.parameters()], step)
    for mean, right in zip(*averaged, strict=True):
        torch.testing.assert_close(mean.full_tensor(), right)


@on_shm_ranks(2)
def test_writing_what_needs_no_gate(rank: int) -> None:
    """Before the first forward, or of a plain module: not even collective. Twice does no harm."""
    ours, one = pair(mlp)
    plain = mlp()
    if rank == 0:
        for target in (ours.model, plain):
            with trireme.writing(target):
                pass
    with trireme.writing(ours.model), trireme.writing(ours.model):
        scale(ours.model)
    scale(one.model)
    train_both(ours, one, 0)
    with trireme.writing(ours.model):
        with trireme.writing(ours.model[0]):
            scale(ours.model[0], 0.5)
        scale(ours.model[2], 0.5)
    scale(one.model[0], 0.5)
    scale(one.model[2], 0.5)
    train_both(ours, one, 1)


@on_shm_ranks(2)
def test_writing_after_forwards_that_left_parameters_unsharded(rank: int) -> None:
    ours, one = pair(mlp, options={"reshard_after_forward": False})
    train_both(ours, one, 0)
    evaluate(ours, 9)
    assert not any(sharded_in(ours.model))
    with trireme.writing(ours.model):
        assert all(sharded_in(ours.model))
        scale(ours.model)
    scale(one.model)
    train_both(ours, one, 1)


@on_shm_ranks(2)
def test_an_exception_inside_of_writing(rank: int) -> None:
    """Stays with the rank that raised it; what it wrote is written."""
    ours = sharded(mlp)
    for failing in (0, 1):
        ours.train(failing)
        if rank == failing:
            with pytest.raises(ArithmeticError), trireme.writing(ours.model):
                raise ArithmeticError("no such weights")
        else:
            with trireme.writing(ours.model):
                scale(ours.model)
        evaluate(ours, 9)
