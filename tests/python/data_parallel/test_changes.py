"""The module in a DataParallel stays the caller's: what is done to it reaches the replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trireme import _C

from data_parallel.cases import (
    DP,
    TIME_LIMIT,
    Called,
    assert_close,
    assert_same_backward,
    pair,
    square_mean,
)
from harness.models import batch, mlp
from harness.training import gradients

pytestmark = TIME_LIMIT


def make() -> nn.Module:
    return mlp(torch.float64)


def data(step: int = 0, rows: int = 7) -> Tensor:
    return batch(step, rows=rows, dtype=torch.float64)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()


# What is done to the module between steps


def replace_layer(module: Any) -> None:
    torch.manual_seed(9)
    module[0] = nn.Linear(6, 13).double()


def add_layer(module: Any) -> None:
    torch.manual_seed(9)
    module.append(nn.Linear(3, 2).double())


def remove_layer(module: Any) -> None:
    del module[4]


def replace_parameter(module: Any) -> None:
    module[4].weight = nn.Parameter(torch.ones_like(module[4].weight))


def tie_parameters(module: Any) -> None:
    module[2].bias = module[4].bias
    module[2].weight = nn.Parameter(module[2].weight[:3].detach().clone())
    module[4].weight = nn.Parameter(module[4].weight[:, :3].detach().clone())


def other_data(module: Any) -> None:
    module[0].weight.data = torch.ones_like(module[0].weight)


def write_data(module: Any) -> None:
    module[0].weight.data.fill_(0.5)


def write_in_place(module: Any) -> None:
    with torch.no_grad():
        module[2].weight.mul_(2)


def other_dtype(module: Any) -> None:
    module.float().double()


def add_weight_norm(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module[0])


def other_layout(module: Any) -> None:
    module[0].weight.data = module[0].weight.detach().t().contiguous().t()


def other_activation(module: Any) -> None:
    module[1] = nn.ReLU()


CHANGES = [
    *(replace_layer, add_layer, remove_layer, replace_parameter, tie_parameters, other_data),
    *(write_data, write_in_place, other_dtype, add_weight_norm, other_layout, other_activation),
]


@pytest.fixture(params=["shared", "copied"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replicas that share the module's parameters, and with copies as on other devices."""
    if request.param == "shared":
        return
    make_options = _C.ReplicasOptions

    def with_copies() -> _C.ReplicasOptions:
        options = make_options()
        options.copy_always = True
        return options

    monkeypatch.setattr(_C, "ReplicasOptions", with_copies)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_reach_the_replicas(change: Callable[[Any], None]) -> None:
    ours, one = pair(make)
    for step in range(2):
        assert_same_backward(ours, one, data(step))
        ours.zero_grad()
        one.zero_grad()
        change(ours.module)
        change(one)
        for repetition in range(2):
            assert_same_backward(ours, one, data(repetition))
        if change in (tie_parameters, add_weight_norm, remove_layer, add_layer):
            break


@pytest.mark.usefixtures("memory")
def test_other_data_between_evaluations() -> None:
    ours, one = pair(make)
    for value in (1.0, 2.0):
        for module in (ours.module, one):
            module[0].weight.data = torch.full_like(module[0].weight, value)
        with torch.no_grad():
            assert_close(ours(data()), one(data()))


def test_another_dtype_between_steps() -> None:
    ours, one = pair(make)
    for dtype in (torch.float64, torch.float32, torch.float64):
        for module in (ours, one):
            module.zero_grad()
            module.to(dtype)
        x = data().to(dtype)
        assert_same_backward(ours, one, x, tolerance={"rtol": 1e-4, "atol": 1e-5})
        assert ours(x).dtype == dtype


def test_another_module() -> None:
    ours, one = pair(make)
    assert_same_backward(ours, one, data())
    ours.module = nn.Linear(6, 2).double()
    assert_same_backward(ours, copy.deepcopy(ours.module), data())


@pytest.mark.usefixtures("memory")
def test_a_forward_before_the_backward_of_an_earlier_one() -> None:
    ours, one = pair(make)
    for module in (ours, one):
        first, second = (square_mean(module(data(step))) for step in range(2))
        first.backward()
        third = square_mean(module(data(2)))
        second.backward()
        third.backward()
    assert_close(gradients(ours), gradients(one))


# Buffers


@pytest.mark.parametrize("replicas", [2, 3])
def test_batch_norm_keeps_the_statistics_of_the_first_part(replicas: int) -> None:
    ours, one = pair(normed, replicas)
    for step in range(3):
        ours(data(step, 9)).sum().backward()
        one(data(step, 9).chunk(replicas)[0])
    for (name, got), expected in zip(ours.module.named_buffers(), one.buffers(), strict=True):
        assert_close(got, expected, msg=name)
    ours.eval()
    one.eval()
    assert_same_backward(ours, one, data(5))
    assert_close(ours(data(6)), one(data(6)))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("training", [True, False])
def test_two_forwards_with_batch_norm_before_a_backward(training: bool) -> None:
    """A discriminator trains so: its loss is of both."""
    ours, one = (module.train(training) for module in pair(normed))

    def in_halves(x: Tensor) -> Tensor:
        return torch.cat([one(half) for half in x.chunk(2)])

    for forward in (ours, in_halves):
        (square_mean(forward(data(0))) + 3 * square_mean(forward(data(1)))).backward()
    assert_close(gradients(ours), gradients(one))


def test_buffers_written_between_steps() -> None:
    ours, one = (module.eval() for module in pair(normed))
    assert_same_backward(ours, one, data())
    for module in (ours.module, one):
        module[1].running_mean.fill_(3)
    assert_same_backward(ours, one, data(1))
    for module in (ours.module, one):
        module[1].running_mean = torch.full((4,), -1.0).double()
    assert_same_backward(ours, one, data(2))
    for module in (ours.module, one):
        module[1].register_buffer("running_mean", torch.full((4,), 2.0).double())
        module[1].running_var.data = torch.full((4,), 0.5).double()
    assert_same_backward(ours, one, data(3))


def test_only_what_was_written_is_copied() -> None:
    """But for buffers of one dimension, to which batch norm writes without a trace. Writes to
    others through ``.data`` leave none either, and are found."""

    def make_tables() -> nn.Module:
        module = Called(lambda m, x: m.net(x @ m.table + m.row), net=make())
        module.register_buffer("table", torch.randn(6, 6).double())
        module.register_buffer("row", torch.randn(6).double())
        return module

    ours, one = pair(make_tables, 3)
    row, table = one.row.nbytes, one.table.nbytes
    for step in range(2):
        assert_same_backward(ours, one, data(step))
        assert ours.last_step()["copied_bytes"] == 2 * row
    for module in (ours.module, one):
        module.table.mul_(2)
    assert_same_backward(ours, one, data(2))
    assert ours.last_step()["copied_bytes"] == 2 * (row + table)
    for module in (ours.module, one):
        module.table.data.mul_(2)
    assert_same_backward(ours, one, data(2))
    assert ours.last_step()["copied_bytes"] == 2 * (row + table)
    assert [r["memory_bytes"] for r in ours.last_step()["replicas"]] == [0, *[row + table] * 2]
    assert_same_backward(ours, one, data(3))
    assert ours.last_step()["copied_bytes"] == 2 * row


def test_what_a_replica_writes_to_its_buffers() -> None:
    """The first one's stays; the others begin each step with the module's."""
    seen: list[int] = []

    def forward(module: Any, x: Tensor) -> Tensor:
        seen.append(int(module.count))
        module.count += 1
        return x * 1

    module = Called(forward)
    module.register_buffer("count", torch.tensor(0))
    ours = DP(module, replicas=2)
    for step in range(3):
        ours(data())
        assert int(module.count) == step + 1
    assert seen == [0, 0, 1, 1, 2, 2]
