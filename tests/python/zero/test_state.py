"""State dicts are those of the plain optimizer: from and to any number of ranks, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme.optim
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from harness.faults import raises
from harness.models import Shapes, mlp
from harness.on_ranks import on_gloo_ranks, on_shm_and_gloo_ranks, on_shm_ranks
from harness.tensors import assert_bits
from harness.training import Training, alone, assert_close, assert_equal_parameters
from zero.ranks import Zero, sharded, train_both, whole_state

STAGES = (1, 2)
StateDict = dict[str, Any]


def assert_states(got: StateDict, expected: StateDict, exact: bool = True) -> None:
    """``exact``: the same bits; else the same but for the order of sums. All of it on CPU."""
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for index, right in expected["state"].items():
        state = got["state"][index]
        assert state.keys() == right.keys()
        for name, value in right.items():
            if not isinstance(value, torch.Tensor):
                assert state[name] == value, (index, name)
            elif exact:
                assert_bits(state[name], value, index, name)
                assert state[name].device.type == "cpu"
            else:
                torch.testing.assert_close(state[name], value)


class Counting(optim.Optimizer):
    """A user's own, which keeps all sorts of things."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state["rate"] = group["lr"] / state["steps"]
                state["names"] = ["a", "b"]
                state["notes"] = {"said": 'a "b" \\ \n', "of": [None, True, 1e300, "ä"]}
                state["none"] = None
                state["signs"] = parameter.grad > 0
                state["nothing"] = torch.empty(0, 3)
                state["of all"] = parameter.grad.sum().bfloat16()
                parameter.sub_(parameter.grad, alpha=state["rate"])


CASES: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1}),
    (optim.NAdam, {"lr": 0.01}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.Adafactor, {"lr": 0.1}),
    (trireme.optim.AdamW, {"lr": 0.01}),
    (Counting, {"lr": 0.1}),
]


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_equals_the_plain_optimizers(rank: int, world: int) -> None:
    for optimizer_class, defaults in CASES:
        for stage in STAGES:
            ours = sharded(mlp, optimizer_class, stage, **defaults)
            one = alone(mlp, optimizer_class, **defaults)
            for step in range(3):
                ours.train(step)
                one.train(step)
            assert_states(whole_state(ours.optimizer), one.optimizer.state_dict(), exact=False)


def _there_and_back(make: Callable[[], nn.Module], optimizer_class: Any, stage: int) -> None:
    """Plain to sharded to plain; then both go on."""
    one = alone(make, optimizer_class, lr=0.01, weight_decay=0.3)
    for step in range(3):
        one.train(step)
    # What has no elements has no state of use, and no owner.
    state = one.optimizer.state_dict()
    sizes = [parameter.numel() for parameter in one.model.parameters()]
    state["state"] = {index: kept for index, kept in state["state"].items() if sizes[index] > 0}
    ours = sharded(make, optimizer_class, stage, lr=0.5)
    with trireme.writing(ours.optimizer):
        ours.model.load_state_dict(one.model.state_dict())
    ours.optimizer.load_state_dict(state)
    assert ours.optimizer.param_groups[0]["lr"] == 0.01
    back = whole_state(ours.optimizer)
    assert_states(back, state)
    buffer = io.BytesIO()
    torch.save(back, buffer)
    buffer.seek(0)
    again = alone(make, optimizer_class, lr=0.5)
    again.model.load_state_dict(one.model.state_dict())
    again.optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    for training in (one, ours, again):
        training.train(3)
    assert_equal_parameters(ours.model, one.model)
    assert_equal_parameters(again.model, one.model, rtol=0, atol=0)


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_from_the_plain_optimizer_and_back(rank: int, world: int) -> None:
    for make in (mlp, Shapes):
        for optimizer_class in (optim.AdamW, trireme.optim.AdamW):
            for stage in STAGES:
                _there_and_back(make, optimizer_class, stage)


@on_gloo_ranks(2)
def test_from_the_plain_optimizer_and_back_over_gloo(rank: int) -> None:
    for stage in STAGES:
        _there_and_back(Shapes, optim.AdamW, stage)


@on_shm_ranks(3)
def test_into_another_number_of_ranks_and_placement(rank: int) -> None:
    ours = sharded(Shapes, optim.AdamW, 2, lr=0.01)
    for step in range(2):
        ours.train(step)
    state = whole_state(ours.optimizer)
    values = {name: value.clone() for name, value in ours.model.state_dict().items()}
    pair = dist.new_group([0, 1])
    whole = sharded(Shapes, optim.AdamW, 1, {"placement": "whole"}, lr=0.5)
    whole.optimizer.load_state_dict(state)
    assert_states(whole_state(whole.optimizer), state)
    if rank == 2:
        return
    options = {"process_group": pair}
    fewer = sharded(Shapes, optim.AdamW, 2, options, lr=0.5)
    fewer.rank, fewer.world = rank, 2
    fewer.optimizer.load_state_dict(state)
    assert_states(whole_state(fewer.optimizer), state)
    with trireme.writing(fewer.optimizer):
        fewer.model.load_state_dict(values)
    one = alone(Shapes, optim.AdamW, lr=0.01)
    one.model.load_state_dict(values)
    one.optimizer.load_state_dict(state)
    one.train(5)
    fewer.train(5)
    for (name, got), right in zip(
        fewer.model.named_parameters(), one.model.parameters(), strict=True
    ):
        assert_close(name, got, right)


@on_gloo_ranks(2)
def test_of_torchs_class_and_into_it(rank: int) -> None:
    theirs = mlp()
    optimizer = TorchZero(theirs.parameters(), optim.AdamW, lr=0.01)
    trainings = [Training(theirs, theirs, optimizer)]  # every rank has all rows
    trainings[0].train(0)
    state = whole_state(optimizer)
    for stage in STAGES:
        ours = sharded(mlp, optim.AdamW, stage, lr=0.5)
        ours.optimizer.load_state_dict(state)
        back = whole_state(ours.optimizer)
        for index, right in state["state"].items():
            for name, value in right.items():
                assert_bits(back["state"][index][name], value, index, name)
        another = TorchZero(mlp().parameters(), optim.AdamW, lr=0.5)
        another.load_state_dict(back)
        found = whole_state(another)
        assert found["param_groups"][0]["lr"] == 0.01
        for index, right in state["state"].items():
            for name, value in right.items():
                assert_bits(found["state"][index][name], value, index, name)


@on_shm_ranks(2)
def test_groups_that_were_added_later(rank: int) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": list(model[2:].parameters()), "lr": 0.1},
            {"params": list(model[:2].parameters()), "momentum": 0.5},
        ]

    for stage in STAGES:
        model, one = mlp(), mlp()
        plain = optim.SGD(groups(one), lr=0.2, momentum=0.9)
        optimizer = Zero(groups(model)[:1], optim.SGD, stage=stage, lr=0.2, momentum=0.9)
        optimizer.add_param_group(groups(model)[1])
        both = [Training(model, model, optimizer), Training(one, one, plain)]
        for step in range(2):
            for training in both:
                training.train(step)
        state = whole_state(optimizer)
        assert_states(state, plain.state_dict(), exact=False)
        fresh = Zero(groups(mlp()), optim.SGD, stage=stage, lr=0.7)
        fresh.load_state_dict(state)
        assert_states(whole_state(fresh), state)


@on_shm_ranks(2)
def test_what_is_not_here_and_what_does_not_fit(rank: int) -> None:
    ours = sharded(mlp, optim.AdamW, 2, lr=0.01)
    ours.train(0)
    with raises(RuntimeError, "was not consolidated here", f"consolidate_state_dict(to={rank})"):
        ours.optimizer.state_dict()
    ours.optimizer.consolidate_state_dict(to=1)
    if rank == 0:
        with raises(RuntimeError, "was not consolidated here"):
            ours.optimizer.state_dict()
    else:
        assert len(ours.optimizer.state_dict()["state"]) == 5
    with raises(ValueError, "got rank 2 to consolidate on"):
        ours.optimizer.consolidate_state_dict(to=2)
    before = whole_state(ours.optimizer)
    for other, parts in (
        (nn.Linear(6, 13), ("groups of [2] parameters, expected [5]",)),
        (nn.Sequential(mlp()[0], nn.Linear(6, 2), nn.Linear(1, 1, bias=False)), ("of shape",)),
    ):
        plain = optim.AdamW(other.parameters(), lr=0.5)
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        plain.step()
        with raises(ValueError, *parts):
            ours.optimizer.load_state_dict(plain.state_dict())
        assert_states(whole_state(ours.optimizer), before)
    ours.train(1)


@on_shm_and_gloo_ranks(2)
def test_a_state_that_json_cannot_say(rank: int) -> None:
    """All ranks raise, and the next consolidation works."""
    ours = sharded(mlp, optim.AdamW, 2, lr=0.01)
    ours.train(0)
    state = ours.optimizer.optim.state
    shard = next(iter(state))
    if rank == 1:
        state[shard]["note"] = object()
        with raises(TypeError, "[zero] got optimizer state 'note' of type object", "in tensors"):
            ours.optimizer.consolidate_state_dict()
        del state[shard]["note"]
    else:
        parts = ("got a state that rank 1 cannot use: TypeError: [zero] got", "of type object")
        with raises(ValueError, *parts):
            ours.optimizer.consolidate_state_dict()
    whole_state(ours.optimizer)


@on_shm_ranks(2)
def test_hooks_of_loading(rank: int) -> None:
    """Those before may change the dictionary, or return another; those after see what is loaded."""
    ours = sharded(mlp, optim.AdamW, 2, lr=0.01)
    ours.train(0)
    state = whole_state(ours.optimizer)
    rates: list[float] = []

    def without_state(optimizer: Any, given: StateDict) -> None:
        given["state"] = {}

    def faster(optimizer: Any, given: StateDict) -> StateDict:
        assert not given["state"]
        return {**given, "param_groups": [{**group, "lr": 0.5} for group in given["param_groups"]]}

    ours.optimizer.register_load_state_dict_pre_hook(without_state)
    ours.optimizer.register_load_state_dict_pre_hook(faster)
    ours.optimizer.register_load_state_dict_post_hook(
        lambda optimizer: rates.append(optimizer.optim.param_groups[0]["lr"])
    )
    ours.optimizer.load_state_dict(state)
    assert rates == [0.5] and not ours.optimizer.optim.state
    assert state["state"] and state["param_groups"][0]["lr"] == 0.01


@on_shm_ranks(2)
def test_before_the_first_step(rank: int) -> None:
    """Nothing is there; and a state is loaded into an optimizer that has never stepped."""
    for stage in STAGES:
        ours = sharded(mlp, optim.AdamW, stage, lr=0.01)
        one = alone(mlp, optim.AdamW, lr=0.01)
        assert_states(whole_state(ours.optimizer), one.optimizer.state_dict())
        ours.optimizer.load_state_dict(one.optimizer.state_dict())
        train_both(ours, one, 0)
