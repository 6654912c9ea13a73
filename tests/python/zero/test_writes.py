"""Writes to parameters outside of step(): refused by name, or done inside trireme.writing()."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset

from harness.faults import raises
from harness.meeting import until_inside
from harness.models import batch, mlp
from harness.on_ranks import AGES_S, on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import (
    Training,
    alone,
    assert_equal_parameters,
    assert_same_on_all_ranks,
    scale,
    values,
)
from zero.ranks import Zero, sharded


def named(stage: int = 2, **options: Any) -> Training:
    """Its messages name parameters as the model does."""
    model = mlp()
    optimizer = Zero(model.named_parameters(), SGD, stage=stage, lr=0.1, **options)
    return Training(model, model, optimizer, dist.get_rank(), dist.get_world_size())


@on_shm_and_gloo_ranks(2)
def test_a_write_outside_is_refused_once(rank: int) -> None:
    """On all ranks at their next step, wherever it was; the step after that works again."""
    for stage in (1, 2):
        ours = named(stage)
        for step, writers in enumerate(((0, 1), (1,), (0,))):
            ours.train(10 * step)
            if rank in writers:
                with torch.no_grad():
                    ours.model[2].weight.add_(0)
            ours.backward(step)
            written = values(ours.model)
            parts = ("[zero] parameter '2.weight' was changed outside step() (rank ", "writing(")
            with raises(RuntimeError, *parts):
                ours.optimizer.step()
            for name, value in values(ours.model).items():
                assert torch.equal(value, written[name])
            ours.train(10 * step + 1)


@on_shm_and_gloo_ranks(2)
def test_a_write_through_data_is_refused_once(rank: int) -> None:
    """It changes no version, and each rank would do it: also before the first step."""
    text = "[zero] parameter '2.weight' was changed outside step() (rank "
    for stage in (1, 2):
        ours = named(stage)
        for step, writers in enumerate(((0, 1), (1,), (0,))):
            if rank in writers:
                ours.model[2].weight.data.mul_(2)
            ours.backward(10 * step)
            with raises(RuntimeError, text, "writing("):
                ours.optimizer.step()
            ours.train(10 * step + 1)
        if rank == 0:  # a view taken before leads around the copies of writing()
            ours.model[2].weight.data.mul_(2)
        with raises(RuntimeError, text), trireme.writing(ours.model):
            pass
        alias = ours.model[2].weight.detach().data
        with raises(RuntimeError, text), trireme.writing(ours.model):
            alias.mul_(2)
        with trireme.writing(ours.model):
            for parameter in ours.model.parameters():
                parameter.data.mul_(0.5)
        ours.train(50)


def halved() -> dict[str, torch.Tensor]:
    return {name: 0.5 * value for name, value in mlp().state_dict().items()}


def load(model: nn.Module) -> None:
    model.load_state_dict(halved())


def load_assigned(model: nn.Module) -> None:
    model.load_state_dict(halved(), assign=True)


def exchange_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 0.5


def initialise(model: nn.Module) -> None:
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter)


@pytest.mark.parametrize("of_model", [False, True], ids=["of optimizer", "of model"])
@on_shm_and_gloo_ranks(2)
def test_what_may_be_done_inside(rank: int, of_model: bool) -> None:
    """Loading, also with assign=True, weight surgery and other data, as in one process."""
    changes: list[Callable[[nn.Module], None]] = [scale, load, exchange_data, initialise]
    if of_model:
        changes.append(load_assigned)
    for stage in (1, 2):
        one, ours = alone(mlp, AdamW, lr=0.01), sharded(mlp, AdamW, stage, lr=0.01)
        held = list(ours.model.parameters())
        for step, change in enumerate([*changes, *reversed(changes)]):
            one.train(step)
            ours.train(step)
            if change is load_assigned:
                load(one.model)  # there, too, an optimizer does not know what was assigned
            else:
                change(one.model)
            with trireme.writing(ours.model if of_model else ours.optimizer):
                change(ours.model)
            assert_equal_parameters(ours.model, one.model)
            for before, after in zip(held, ours.model.parameters(), strict=True):
                assert before is after
        if dist.get_backend() == "trireme":
            assert ours.optimizer._cores[0].shares_parameters
            assert_shared(ours.model, rank)


def assert_shared(model: nn.Module, rank: int) -> None:
    """What one rank writes behind everybody's back all see."""
    dist.barrier()  # nobody compares any more
    for number, parameter in enumerate(model.parameters()):
        if number % 2 == rank:
            parameter.data.fill_(7 + number)
    dist.barrier()
    for number, parameter in enumerate(model.parameters()):
        assert torch.all(parameter == 7 + number)


@on_shm_ranks(2)
def test_averaged_weights_in_and_out(rank: int) -> None:
    """Swapped in for an evaluation and out again, while one rank takes its time."""
    one, ours = alone(mlp, SGD, lr=0.1), sharded(mlp, SGD, 2, lr=0.1)
    averages = [values(training.model) for training in (one, ours)]
    for step in range(3):
        outputs = []
        for training, average in zip((one, ours), averages, strict=True):
            training.train(step)
            for name, value in values(training.model).items():
                average[name].lerp_(value, 0.1)
            kept = values(training.model)
            for swapped in (average, kept):
                with trireme.writing(training.model):
                    if rank == 1 and training is ours:
                        until_inside(0)  # rank 0 has written and waits for this rank
                    training.model.load_state_dict(swapped)
                with torch.no_grad():
                    outputs.append(training.model(batch(50)))
        torch.testing.assert_close(outputs[2:], outputs[:2])
        assert not torch.equal(outputs[0], outputs[1])


@on_shm_ranks(2)
def test_other_data_on_all_ranks_or_none(rank: int) -> None:
    for stage in (1, 2):
        one, ours = alone(mlp, SGD, lr=0.1), sharded(mlp, SGD, stage, lr=0.1)
        one.train(0)
        ours.train(0)
        for training in (one, ours):
            exchange_data(training.model)
            training.train(1)
        assert_equal_parameters(ours.model, one.model)
        if rank == 1:
            weight = ours.model[0].weight
            weight.data = weight.detach().clone()
        ours.optimizer.zero_grad()
        ours.backward(2)
        with raises(RuntimeError, "was given other data on some of the ranks only", "[zero]"):
            ours.optimizer.step()


@on_shm_and_gloo_ranks(2)
def test_what_a_store_cannot_take(rank: int) -> None:
    def cast(model: nn.Module) -> None:
        model[2].to(torch.float64)

    def reshape(model: nn.Module) -> None:
        model[2].weight.data = torch.ones(2, 2)

    for change in (cast, reshape):
        for writers in ((0, 1), (1,)):
            ours = named()
            ours.train(0)
            if rank in writers:
                change(ours.model)
            text = "[zero] got '2.weight' with another shape, dtype or device"
            with raises(RuntimeError, text, "Make the optimizer anew"):
                ours.optimizer.step()
            with raises(RuntimeError, text), trireme.writing(ours.model):
                pass


@pytest.mark.parametrize(("rows", "changed_on"), [(1, (0, 1)), (3000, (0, 1)), (3000, (1,))])
@on_shm_ranks(2)
def test_gradients_of_another_shape(rank: int, rows: int, changed_on: tuple[int, ...]) -> None:
    """Stage 2 says so in the backward that brings them, and deposits no memory behind them."""
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 300))
    module[1].requires_grad_(False)
    optimizer = Zero(module.named_parameters(), SGD, lr=0.1, stage=2)
    module(batch(0)).sum().backward()
    optimizer.step()
    if rank in changed_on:
        module[1].weight.data = torch.ones(rows, 4)
        module[1].bias.data = torch.ones(rows)
        module[1].requires_grad_(True)
    text = f"'1.weight' was Float [300, 4], is Float [{rows}, 4]"
    for step in (1, 2):
        with raises(ValueError, "[zero] got ", f"(rank {rank} of 2)", text):
            module(batch(step)).sum().backward()


@on_shm_ranks(2)
def test_a_parameter_of_another_shape_in_its_place(rank: int) -> None:
    ours = named()
    parts = ("[zero] got 'weight' of shape (2, 2) in place of one of shape (5, 13)", "anew")
    with raises(ValueError, *parts), trireme.writing(ours.model):
        ours.model[2].weight = nn.Parameter(torch.ones(2, 2))


@on_shm_ranks(2)
def test_a_write_before_writing_is_refused_there(rank: int) -> None:
    ours = named()
    if rank == 1:
        scale(ours.model[2])
    text = "'2.weight' was changed outside step()"
    with raises(RuntimeError, text), trireme.writing(ours.optimizer):
        raise AssertionError("went in")
    with trireme.writing(ours.optimizer):
        scale(ours.model)
    ours.train(0)


@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_an_exception_inside_of_writing(rank: int) -> None:
    """The others raise at the end of theirs, and what was written is nobody's."""
    ours = named()
    for failing in (0, 1):
        before = values(ours.model)
        if rank == failing:
            expected = pytest.raises(ArithmeticError, match="no such weights")
            with expected, trireme.writing(ours.optimizer):
                scale(ours.model, 3.0)
                raise ArithmeticError("no such weights")
        else:
            parts = ("ArithmeticError: no such weights", f"(rank {failing} of 2)")
            with raises(dist.DistBackendError, *parts), trireme.writing(ours.optimizer):
                scale(ours.model)
        for name, value in values(ours.model).items():
            assert torch.equal(value, before[name])
        ours.train(failing)
        with trireme.writing(ours.optimizer):
            scale(ours.model, 0.5)
        assert_same_on_all_ranks(list(ours.model.parameters()))


@on_shm_ranks(2)
def test_ranks_that_write_different_values(rank: int) -> None:
    """The owner of a part decides, on all ranks at once."""
    for options in ({}, {"host_params": False}):
        ours = named(**options)
        with trireme.writing(ours.model):
            for parameter in ours.model.parameters():
                parameter.data.fill_(rank)
        assert_same_on_all_ranks(list(ours.model.parameters()))
        assert [ours.model[0].bias[row].item() for row in (0, 12)] == [0, 1]


@on_shm_ranks(2)
def test_writing_inside_of_writing(rank: int) -> None:
    """The end of the inner one ends both: what is written after it is refused."""
    ours = named()
    with trireme.writing(ours.model), trireme.writing(ours.optimizer):
        scale(ours.model)
    expected = {name: 2 * value for name, value in mlp().state_dict().items()}
    for name, value in values(ours.model).items():
        assert torch.equal(value, expected[name])
    text = "'4.weight' was changed outside step()"
    with raises(RuntimeError, text), trireme.writing(ours.model):
        with trireme.writing(ours.optimizer):
            pass
        scale(ours.model[4])
    ours.train(0)


@on_shm_ranks(2)
def test_nothing_to_wait_for(rank: int) -> None:
    """No optimizer holds the parameters: not even collective."""
    if rank == 0:
        model = mlp()
        with trireme.writing(model):
            scale(model)
        torch.testing.assert_close(model[0].weight, 2 * mlp()[0].weight)


class Remembered(Dataset):
    """Rows computed with the parameters that the process holds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(batch(index))


@on_shm_ranks(2, timeout=60, fresh=True)  # a DataLoader leaves a signal handler
def test_forked_readers(rank: int) -> None:
    """A worker of a DataLoader and a child read what the ranks hold, and end without a trace."""
    ours = named()
    ours.train(0)
    loader = DataLoader(
        Remembered(ours.model), batch_size=1, num_workers=1, multiprocessing_context="fork"
    )
    with torch.no_grad():
        expected = [ours.model(batch(index)) for index in range(2)]
    torch.testing.assert_close([rows[0] for rows in loader], expected, rtol=0, atol=0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, ours.model[0].weight.detach().numpy().tobytes())
        os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 4096) == ours.model[0].weight.detach().numpy().tobytes()
    assert os.waitpid(child, 0)[1] == 0
    ours.train(1)
    assert_same_on_all_ranks(list(ours.model.parameters()))
