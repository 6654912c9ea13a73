"""What programs written for torch's class do: load after making it, make it again, name nothing."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, AdamW

from harness.faults import raises
from harness.meeting import say, stay_until
from harness.models import batch, mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import Training, alone, assert_equal_parameters, values
from zero.ranks import DDP, STAGES, Zero, sharded, train_both

State = dict[str, torch.Tensor]

# --- Loading a state without writing() ------------------------------------------------------------


def other(factor: float = 0.5) -> State:
    return {name: factor * value for name, value in mlp().state_dict().items()}


def load(model: nn.Module) -> None:
    model.load_state_dict(other())


def load_twice(model: nn.Module) -> None:
    model.load_state_dict(other(3.0))
    model.load_state_dict(other(0.25))


def load_some(model: nn.Module) -> None:
    some = {"0.bias": torch.ones(13), "4.weight": torch.full((3, 5), 0.1), "7.x": torch.ones(1)}
    model.load_state_dict(some, strict=False)


def load_a_layer(model: nn.Module) -> None:
    model[2].load_state_dict({"weight": torch.full((5, 13), 0.2)})


def load_and_fail(model: nn.Module) -> None:
    """torch has loaded the rest when it raises."""
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        model.load_state_dict({**other(), "0.bias": torch.ones(2)})


def load_and_write(model: nn.Module) -> None:
    """What has memory of its own may be written in place."""
    model.load_state_dict(other())
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def load_what_was_saved(model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    load(model)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))


LOADS = (load, load_twice, load_some, load_a_layer, load_and_fail, load_and_write)


@on_shm_and_gloo_ranks(2)
def test_loading_after_the_optimizer_was_made(rank: int) -> None:
    """Before the first step, between steps, after a backward: all as in one process."""
    for stage, make in ((1, mlp), (2, mlp), (2, lambda: copy.deepcopy(mlp()))):
        one, ours = alone(make, AdamW, lr=0.01), sharded(make, AdamW, stage, lr=0.01)
        held = list(ours.model.parameters())
        for step, change in enumerate([load, *LOADS, load_what_was_saved, load]):
            if step == 3:
                one.backward(90)
                ours.backward(90)
            change(one.model)
            change(ours.model)
            assert_equal_parameters(ours.model, one.model)
            train_both(ours, one, step)
            assert all(a is b for a, b in zip(held, ours.model.parameters(), strict=True))
            assert_in_place(ours)


def assert_in_place(ours: Training) -> None:
    """What this rank's optimizer writes is the parameter: nothing has memory of its own."""
    plan = ours.optimizer._cores[0].plan()
    for ranges, parameter in zip(plan, ours.model.parameters(), strict=True):
        begin, numel = ranges[ours.rank]
        shard = ours.optimizer._shards[parameter]
        if numel > 0:
            assert shard.data_ptr() == parameter.data_ptr() + begin * parameter.element_size()


@on_shm_ranks(2)
def test_loading_through_wrappers_and_with_assign(rank: int) -> None:
    """The order of torch's tutorials: DDP, the optimizer, then what was saved."""
    for wrap in (DDP, TorchDDP):
        one = alone(mlp, SGD, lr=0.1)
        model = mlp()
        net = wrap(model)
        optimizer = Zero(net.parameters(), SGD, lr=0.1)
        ours = Training(model, net, optimizer, rank, 2)
        load(one.model)
        net.load_state_dict({f"module.{name}": value for name, value in other().items()})
        one.train(0)
        ours.train(0)
        assert_equal_parameters(model, one.model)
    one, ours = alone(mlp, SGD, lr=0.1), sharded(mlp, SGD, 2, lr=0.1)
    held = list(ours.model.parameters())
    load(one.model)
    ours.model.load_state_dict(other(), assign=True)
    assert all(a is b for a, b in zip(held, ours.model.parameters(), strict=True))
    train_both(ours, one, 0)
    parts = ("[zero] got load_state_dict(assign=True) with torch.float64", "for '0.weight'")
    with raises(ValueError, *parts):
        ours.model.load_state_dict(mlp(torch.float64).state_dict(), assign=True)
    ours.train(1)


@on_shm_ranks(2)
def test_what_one_rank_loads_no_other_sees(rank: int) -> None:
    """It may still compute; its parameters change in the step that all take together."""
    ours = sharded(mlp, SGD, 2, lr=0.1)
    before = values(ours.model)
    if rank == 1:
        load(ours.model)
        say("loaded")
        stay_until("looked")
        expected = other()
    else:
        stay_until("loaded")
        expected = before
    for name, value in values(ours.model).items():
        assert torch.equal(value, expected[name])
    if rank == 0:
        say("looked")


@on_shm_and_gloo_ranks(2)
def test_loading_on_one_rank_or_other_values(rank: int) -> None:
    """All ranks raise, in each step until they have loaded the same."""
    for stage in (1, 2):
        one, ours = alone(mlp, SGD, lr=0.1), sharded(mlp, SGD, stage, lr=0.1)
        if rank == 1:
            ours.model[2].load_state_dict({"weight": torch.ones(5, 13)})
        ours.backward(0)
        for _ in range(2):
            text = "[zero] parameter '2.weight' was given other data on some of the ranks only"
            with raises(RuntimeError, text, "Load or assign it on all of them"):
                ours.optimizer.step()
        state = other()
        state["4.bias"][2] += rank * 1e-6
        ours.model.load_state_dict(state)
        text = "'4.bias' was given other data on all ranks, with values that differ between them"
        for _ in range(2):
            with raises(RuntimeError, text):
                ours.optimizer.step()
        with raises(RuntimeError, text), trireme.writing(ours.model):
            raise AssertionError("went in")
        load(one.model)
        load(ours.model)
        train_both(ours, one, 1)


@on_shm_ranks(2)
def test_a_write_before_loading_is_refused(rank: int) -> None:
    """What ranks have written into one memory is not made good by what they load."""
    ours = sharded(mlp, SGD, 2, lr=0.1)
    with torch.no_grad():
        ours.model[4].weight.mul_(2)
    load_some(ours.model)
    with raises(RuntimeError, "[zero] parameter '4.weight' was changed outside step()"):
        ours.optimizer.step()


@on_shm_ranks(2)
def test_loading_before_writing_and_an_exception_there(rank: int) -> None:
    """What was loaded stays; what was written inside is dropped."""
    ours = sharded(mlp, SGD, 2, lr=0.1)
    load(ours.model)
    kind = ArithmeticError if rank == 0 else dist.DistBackendError
    with pytest.raises(kind), trireme.writing(ours.model):
        ours.model.load_state_dict(other(7.0))
        if rank == 0:
            raise ArithmeticError("no such weights")
    for name, value in values(ours.model).items():
        assert torch.equal(value, other()[name])
    ours.train(0)
    assert_in_place(ours)


@on_shm_ranks(1)
def test_copies_of_a_model_know_nothing_of_it(rank: int) -> None:
    ours = sharded(mlp, SGD, 2, lr=0.1)
    pickled = pickle.dumps(ours.model)
    assert b"trireme" not in pickled
    for copied in (copy.deepcopy(ours.model), pickle.loads(pickled)):
        load(copied)
        assert torch.equal(copied[0].weight, other()["0.weight"])
        again = Training(copied, copied, Zero(copied.parameters(), SGD, stage=2, lr=0.1))
        load(copied)
        again.train(0)


# --- The optimizer made again ---------------------------------------------------------------------


def calls(optimizer: Any) -> list[Callable[[], Any]]:
    return [
        optimizer.step,
        optimizer.zero_grad,
        optimizer.consolidate_state_dict,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        lambda: trireme.writing(optimizer).__enter__(),
    ]


@STAGES
@on_shm_ranks(2)
def test_made_again(rank: int, stage: int) -> None:
    """A cell of a notebook that is run again does so: the last one steps, from what is there."""
    one, ours = alone(mlp, AdamW, lr=0.01), sharded(mlp, AdamW, stage, lr=0.01)
    kept, mapped = [], []
    for step in range(4):
        one.train(2 * step)
        ours.train(2 * step)
        ours.backward(3)  # left over
        kept.append((ours.optimizer, ours.optimizer._cores))  # a traceback keeps them so
        one.optimizer = AdamW(one.model.parameters(), lr=0.01)
        ours.optimizer = Zero(ours.model.parameters(), AdamW, stage=stage, lr=0.01)
        mapped.append(Path("/proc/self/maps").read_text().count("memfd:trireme"))
        for call in calls(kept[-1][0]):
            with raises(RuntimeError, "[zero] got a call of an optimizer whose parameters another"):
                call()
        train_both(ours, one, 2 * step + 1)
    assert mapped[-1] == mapped[1], "memory of the first ones was kept"
    kept.clear()
    ours.train(9)


@STAGES
@on_shm_ranks(2)
def test_all_parameters_or_none(rank: int, stage: int) -> None:
    """A part of what another one holds is refused by name; all of it and more is taken over."""
    model = mlp()
    first = Zero(model[0].parameters(), SGD, stage=stage, lr=0.1)
    second = Zero(model[2].parameters(), SGD, stage=stage, lr=0.1)
    parts = (
        "[zero] got '0.weight', which another ZeroRedundancyOptimizer holds, without '0.bias', ",
        "Give all of them to take over from it",
    )
    with raises(ValueError, *parts):
        Zero([model[0].weight, model[4].weight], SGD, stage=stage, lr=0.1)
    with raises(ValueError, *parts):
        second.add_param_group({"params": [model[0].weight]})
    if rank == 0:
        with raises(ValueError, *parts):
            Zero([model[0].weight], SGD, stage=stage, lr=0.1)
    else:
        with raises(ValueError, "got parameters that rank 0 cannot use: ", *parts):
            Zero([model[4].weight], SGD, stage=stage, lr=0.1)
    with pytest.raises(ValueError, match=r"[Ii]nvalid learning rate"):
        Zero(model.parameters(), SGD, stage=stage, lr=-1.0)
    for optimizer in (first, second):  # both as before
        model(batch(0)[rank::2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    second.add_param_group({"params": model[0].parameters()})
    with raises(RuntimeError, "has taken over"):
        first.step()
    model.zero_grad()
    model(batch(0)[rank::2]).sum().backward()
    second.step()
    third = Zero(model.parameters(), SGD, stage=stage, lr=0.1)
    with raises(RuntimeError, "has taken over"):
        second.step()
    model(batch(0)[rank::2]).sum().backward()
    third.step()


@on_shm_ranks(2)
def test_a_state_goes_from_one_to_the_next(rank: int) -> None:
    one, ours = alone(mlp, AdamW, lr=0.01), sharded(mlp, AdamW, 2, lr=0.01)
    one.train(0)
    ours.train(0)
    first = ours.optimizer
    first.consolidate_state_dict(0)
    state = first.state_dict() if rank == 0 else None
    first.consolidate_state_dict(1)
    ours.optimizer = Zero(ours.model.parameters(), AdamW, stage=2, lr=0.01)
    ours.optimizer.load_state_dict(state or first.state_dict())
    train_both(ours, one, 1)


# --- Names ----------------------------------------------------------------------------------------


def changed(model: nn.Module) -> None:
    with torch.no_grad():
        model[4].weight.mul_(2)


@STAGES
@on_shm_ranks(2)
def test_errors_say_what_the_module_calls_a_parameter(rank: int, stage: int) -> None:
    """Through wrappers and without, in groups, and where one rank has a wrapper of its own."""
    groups: list[Callable[[nn.Module], Any]] = [
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: [{"params": model[:4].parameters()}, {"params": model[4].parameters()}],
        lambda model: [
            {"params": list(itertools.islice(model.named_parameters(), 3))},
            {"params": list(itertools.islice(model.named_parameters(), 3, None)), "lr": 0.5},
        ],
    ]
    for wrap in (DDP, TorchDDP) if stage == 1 else (nn.Module.train, torch.compile):
        for of_model in groups:
            model = mlp()
            logged = nn.ModuleDict({"watched": model}) if rank == 0 else None
            net: Any = wrap(model)
            optimizer = Zero(of_model(model), SGD, stage=stage, lr=0.1)
            changed(model)
            with raises(RuntimeError, "4.weight' was changed outside step()"):
                optimizer.step()
            del net, logged
    model = mlp()
    optimizer = Zero(model[0].named_parameters(), SGD, stage=stage, lr=0.1)
    optimizer.add_param_group({"params": model[4].named_parameters()})
    changed(model)
    with raises(RuntimeError, "parameter 'weight' was changed"):
        optimizer.step()
    loose = [nn.Parameter(torch.ones(3))]
    optimizer = Zero(loose, SGD, stage=stage, lr=0.1)
    loose[0].data = torch.ones(2)
    with raises(RuntimeError, "got 'param_groups[0]['params'][0]' with another shape"):
        optimizer.step()


@on_shm_ranks(2)
def test_a_state_has_names_where_torch_gives_them(rank: int) -> None:
    for make in (nn.Module.parameters, nn.Module.named_parameters):
        model = mlp()
        optimizer = Zero(make(model), SGD, stage=2, lr=0.1)
        optimizer.consolidate_state_dict()
        if rank == 0:
            expected = SGD(make(mlp()), lr=0.1).state_dict()
            assert optimizer.state_dict()["param_groups"] == expected["param_groups"]
