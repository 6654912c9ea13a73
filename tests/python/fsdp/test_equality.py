"""fully_shard trains as one process does on the whole batch, and as torch's fully_shard does."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW

from fsdp.ranks import (
    assert_locals,
    assert_parts,
    in_training,
    local,
    pair,
    rows_of,
    shard_layers,
    sharded,
    sharded_in,
    step_both,
    torch_pair,
    train_both,
)
from harness.models import Shapes, Tied, mlp
from harness.on_ranks import on_shm_ranks
from harness.training import alone, assert_close
from shm.ranks import WORLDS

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (AdamW, {"lr": 0.01, "foreach": True}),
    (AdamW, {"lr": 0.01, "fused": True}),
    (AdamW, {"lr": 0.01, "foreach": False}),
    (Adam, {"lr": 0.01, "amsgrad": True}),
    (trireme.optim.AdamW, {"lr": 0.01}),
    (trireme.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]


@pytest.mark.parametrize("world", WORLDS)
@on_shm_ranks("world")
def test_as_one_process(rank: int, world: int) -> None:
    """Uneven rows, fewer rows than ranks, no elements, no dimensions, four dtypes, tied ones."""
    for make in (mlp, Shapes, Tied):
        for shard in (shard_layers, trireme.fully_shard):
            ours, one = pair(make, shard=shard)
            assert_parts(ours, one)
            for step in range(4):
                train_both(ours, one, step)


@on_shm_ranks(2)
def test_optimizers(rank: int) -> None:
    for optimizer_class, defaults in OPTIMIZERS:
        ours, one = pair(mlp, optimizer_class, **defaults)
        for step in range(3):
            train_both(ours, one, step, atol=5e-5)


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_as_torch_over_gloo(rank: int, world: int) -> None:
    """Its gradients, DTensors, state dict and optimizer state, on the same seeds."""
    for options in ({}, {"reshard_after_forward": False}):
        ours, theirs = torch_pair(mlp, AdamW, lr=0.01, **options)
        for step in range(4):
            norms = []
            for training in (ours, theirs):
                training.optimizer.zero_grad()
                training.backward(step)
                norm = clip_grad_norm_(training.model.parameters(), 0.05)
                assert isinstance(norm, DTensor)
                norms.append(norm.full_tensor())
            torch.testing.assert_close(*norms)
            assert_locals(ours.model, theirs.model)
            for training in (ours, theirs):
                training.optimizer.step()
        assert_locals(ours.model, theirs.model)
        _assert_same_kind(ours.model, theirs.model)
        for name, state in ours.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                other = theirs.optimizer.state_dict()["state"][name][key]
                assert type(value) is type(other)
                assert_close(f"{name}.{key}", local(value), local(other))


def _assert_same_kind(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.modules(), theirs.modules(), strict=True):
        assert type(one).__name__ == type(other).__name__
    got, expected = ours.state_dict(), theirs.state_dict()
    assert list(got) == list(expected)
    for name, value in got.items():
        assert value.placements == expected[name].placements
        assert value.shape == expected[name].shape
        assert value.stride() == expected[name].stride()
        assert torch.equal(value.full_tensor(), dict(ours.named_parameters())[name].full_tensor())


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_clipping_by_torch(rank: int, world: int) -> None:
    for foreach in (None, True, False):
        ours, one = pair(mlp)
        for step, norm_type in enumerate((2.0, 1.0, float("inf"), 2.0)):
            norms = []
            for training in (ours, one):
                training.optimizer.zero_grad()
                training.backward(step)
                parameters = training.model.parameters()
                norm = clip_grad_norm_(parameters, 0.05, norm_type, foreach=foreach)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            torch.testing.assert_close(*norms)
            step_both(ours, one)


@on_shm_ranks(2)
def test_two_optimizers(rank: int) -> None:
    """Each steps its own parameters: in one go, in turns, or with a forward in between."""

    def optimizers(model: nn.Module) -> list[Any]:
        return [SGD(model[0].parameters(), lr=0.1), AdamW(model[1:].parameters(), lr=0.01)]

    model = shard_layers(mlp())
    ours, one = in_training(model), alone(mlp, SGD, lr=0.1)
    both = [(training, optimizers(training.model)) for training in (ours, one)]
    for step in range(6):
        for training, own in both:
            training.model.zero_grad()
            training.backward(step)
            own[step % 2].step()
            if step == 4:
                with torch.no_grad():
                    training.loss(9)
            if step > 2:
                own[1 - step % 2].step()
        assert_parts(ours, one)


@on_shm_ranks(2)
def test_a_module_shows_what_its_flags_say(rank: int) -> None:
    """Sharded or unsharded after forward and backward, by hand, and what a method may do."""
    ours, one = pair(mlp)
    model = ours.model
    for after_forward in (True, False):
        for after_backward in (True, False):
            model.set_reshard_after_forward(after_forward)
            model.set_reshard_after_backward(after_backward)
            train_both_watching(ours, one, after_forward, after_backward)
    model.set_reshard_after_backward(True)
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)
    ours.optimizer.zero_grad()
    loss = ours.loss(0)
    assert all(sharded_in(model))  # all parameters are the inner units'
    loss.backward()
    model[0].unshard()
    assert sharded_in(model) == [False, False, True, True, True]
    torch.testing.assert_close(model[0].weight, one.model[0].weight)
    assert not isinstance(model[0].weight.detach(), DTensor)
    handle = model[2].unshard(async_op=True)
    handle.wait()
    assert sharded_in(model) == [False, False, False, True, True]
    for unit in (model[0], model[2]):
        unit.reshard()
    assert all(sharded_in(model))
    train_both(ours, one, 7)


def train_both_watching(ours: Any, one: Any, after_forward: bool, after_backward: bool) -> None:
    for step in range(2):
        for training in (ours, one):
            training.optimizer.zero_grad()
            loss = training.loss(step)
            if training is ours:
                assert all(shown is after_forward for shown in sharded_in(ours.model))
            loss.backward()
            if training is ours:
                assert all(shown is after_backward for shown in sharded_in(ours.model))
                for unit in (ours.model[0], ours.model[2], ours.model[4], ours.model):
                    unit.reshard()
        step_both(ours, one)


class Encoder(nn.Module):
    """Has two methods; neither is forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).tanh()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


@on_shm_ranks(2)
def test_methods_that_are_no_forward(rank: int) -> None:
    for inner in (False, True):
        model = Encoder()
        if inner:
            trireme.fully_shard(model.up)
        trireme.fully_shard(model)
        for name in ("encode", "decode"):
            torch.distributed.fsdp.register_fsdp_forward_method(model, name)
        ours, one = in_training(model), alone(Encoder, SGD, lr=0.1, momentum=0.9)
        for step in range(3):
            for training in (ours, one):
                training.optimizer.zero_grad()
                rows = rows_of(step, training)
                training.model.decode(training.model.encode(rows)).square().mean().backward()
            step_both(ours, one)
            assert all(sharded_in(model))


class Outputs(NamedTuple):
    rows: torch.Tensor
    others: dict[str, Any]


class Structured(nn.Module):
    """Takes and returns structures; one output is made without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: dict[str, Any], *, factor: list[torch.Tensor]) -> Outputs:
        hidden = self.a(x["rows"]).tanh() * factor[0]
        return Outputs(hidden, {"b": [self.b(hidden), None, 3], "kept": hidden.detach()})


@on_shm_ranks(2)
def test_structures_in_and_out(rank: int) -> None:
    """Gradients may come back through any of the tensors in them, or through one only."""
    ours, one = pair(Structured)
    for step in range(4):
        for training in (ours, one):
            training.optimizer.zero_grad()
            rows = {"rows": rows_of(step, training)}
            output = training.model(rows, factor=[torch.tensor(2.0)])
            last = output.others["b"][0].square().mean()
            (last if step % 2 else last + output.rows.square().mean()).backward()
        step_both(ours, one)


@on_shm_ranks(3)
def test_modules_that_make_one_unit(rank: int) -> None:
    """A list, of which the root is not one."""

    def shard(model: nn.Module) -> None:
        trireme.fully_shard([model[0], model[2]])
        trireme.fully_shard(model)

    ours, one = pair(mlp, shard=shard)
    assert ours.model[0]._get_fsdp_state() is ours.model[2]._get_fsdp_state()
    for step in range(4):
        train_both(ours, one, step)
    ours.model[2].unshard()
    assert sharded_in(ours.model) == [False, False, False, True, True]


@on_shm_ranks(2)
def test_two_models_on_one_group(rank: int) -> None:
    """Each has gates, rings and optimizers of its own; the second trains on the first's output."""
    first, one_first = pair(lambda: nn.Sequential(mlp(), nn.Linear(3, 6)))
    second, one_second = pair(mlp)
    for step in range(4):
        for a, b in ((first, second), (one_first, one_second)):
            a.optimizer.zero_grad()
            b.optimizer.zero_grad()
            b.model(a.model(rows_of(step, a))).square().mean().backward()
        step_both(first, one_first)
        step_both(second, one_second)


@on_shm_ranks(2)
def test_last_step_says_where_time_went(rank: int) -> None:
    ours = sharded(mlp)
    for step in range(3):
        ours.train(step)
    report = ours.model.last_step()
    assert report and all(value >= 0 for value in report.values())
