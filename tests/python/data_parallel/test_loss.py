"""DataParallel with the loss on the replicas, and with unequal parts of the batch."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from data_parallel.cases import DP, TIME_LIMIT, Called, assert_close, assert_same_backward, pair
from harness.models import batch, mlp
from harness.training import gradients

pytestmark = TIME_LIMIT

ROWS = 7


def make() -> nn.Module:
    return mlp(torch.float64)


def data(step: int = 0, rows: int = ROWS) -> Tensor:
    return batch(step, rows=rows, dtype=torch.float64)


def classes(rows: int = ROWS) -> Tensor:
    return torch.arange(rows) % 3


def wanted(rows: int = ROWS) -> Tensor:
    return batch(9, rows=rows, width=3, dtype=torch.float64)


def absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


LOSSES: dict[str, tuple[Any, Tensor]] = {
    "function": (functional.cross_entropy, classes()),
    "own function": (absolute, wanted()),
    "smoothed": (functools.partial(functional.cross_entropy, label_smoothing=0.1), classes()),
    "partial sum": (functools.partial(functional.mse_loss, reduction="sum"), wanted()),
    "module": (nn.MSELoss(), wanted()),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), classes()),
    "with buffers": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double(), reduction="sum"),
        classes(),
    ),
}


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str, replicas: int) -> None:
    """There are 7 rows, so that the parts differ."""
    loss, target = LOSSES[name]
    ours, one = pair(make, replicas, loss=loss)
    for step in range(2):
        got = ours(data(step), target=target)
        assert got.shape == ()
        ours.zero_grad()
        (got * 3).backward()
        expected = loss(one(data(step)), target)
        one.zero_grad()
        (expected * 3).backward()
        assert_close(got, expected)
        assert_close(gradients(ours), gradients(one))


def test_a_loss_per_row_is_gathered() -> None:
    ours, one = pair(make, 3, loss=nn.CrossEntropyLoss(reduction="none"))
    got = ours(data(), target=classes())
    expected = functional.cross_entropy(one(data()), classes(), reduction="none")
    assert_close(got, expected)
    weights = torch.linspace(1, 2, ROWS)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_close(gradients(ours), gradients(one))


def test_a_loss_of_several_parts() -> None:
    """What is counted is a number per replica."""

    def loss(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {
            "loss": functional.cross_entropy(output, target),
            "hits": (output.argmax(1) == target).sum(),
        }

    ours, one = pair(make, 2, loss=loss)
    got, expected = ours(data(), target=classes()), loss(one(data()), classes())
    assert got["hits"].shape == (2,)
    assert got["hits"].sum() == expected["hits"]
    got["loss"].backward()
    expected["loss"].backward()
    assert_close(gradients(ours), gradients(one))


def test_without_target_there_are_outputs() -> None:
    ours, one = pair(make, loss=functional.cross_entropy)
    assert_close(ours(data()), one(data()))
    assert_same_backward(ours, one, data())


def test_the_module_is_not_given_the_target() -> None:
    given: list[Any] = []
    ours = DP(
        Called(lambda m, x, **named: (given.append(named), m.net(x))[1], net=make()),
        replicas=2,
        loss=functional.cross_entropy,
    )
    ours(data(), target=classes(), other=1)
    assert given == [{"other": 1}] * 2


def test_a_structure_as_target() -> None:
    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return (output * target["scale"] - target["y"]).square().mean()

    target = {"y": wanted(), "scale": wanted()[:, :1]}
    ours, one = pair(make, 3, loss=loss)
    got, expected = ours(data(), target=target), loss(one(data()), target)
    got.backward()
    expected.backward()
    assert_close(got, expected)
    assert_close(gradients(ours), gradients(one))


def test_targets_of_several_rows_for_each() -> None:
    """A language model's, laid out flat."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.reshape(-1, 3), target)

    def flat() -> nn.Module:
        return Called(lambda m, x: m.net(x.view(-1, 2, 6)), net=make())

    x, target = data(rows=ROWS).repeat(1, 2), classes(2 * ROWS)
    ours, one = pair(flat, 2, loss=loss)
    got, expected = ours(x, target=target), loss(one(x), target)
    got.backward()
    expected.backward()
    assert_close(got, expected)
    assert_close(gradients(ours), gradients(one))


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    ours, one = pair(make, 3, loss=nn.MSELoss(reduction="sum"))
    got = ours(data(rows=rows), target=wanted(rows))
    got.backward()
    (one(data(rows=rows)) - wanted(rows)).square().sum().backward()
    assert got.shape == ()
    assert_close(gradients(ours), gradients(one))


def test_without_gradients_and_on_one_replica() -> None:
    for replicas in (1, 2):
        ours, one = pair(make, replicas, loss=functional.cross_entropy)
        with torch.no_grad():
            got = ours(data(), target=classes())
            assert_close(got, functional.cross_entropy(one(data()), classes()))
        assert not got.requires_grad


def test_the_loss_is_computed_on_the_replicas() -> None:
    threads: set[str] = set()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        threads.add(threading.current_thread().name)
        return absolute(output, target)

    ours, _ = pair(make, 3, loss=loss)
    ours(data(), target=wanted())
    assert len(threads) == 3
    assert threading.current_thread().name not in threads


def rows_of(ours: Any) -> list[int]:
    return [replica["rows"] for replica in ours.last_step()["replicas"]]


@pytest.mark.parametrize(
    ("weights", "rows"),
    [
        ([1, 1], [4, 3]),
        ([3, 1], [5, 2]),
        ([1, 6], [1, 6]),
        ([0, 1], [0, 7]),
        ([1, 2, 4], [1, 2, 4]),
    ],
)
@pytest.mark.parametrize("loss", [None, functional.cross_entropy])
def test_weights(weights: list[float], rows: list[int], loss: Any) -> None:
    ours, one = pair(make, len(weights), balance=weights, loss=loss)
    for step in range(2):
        ours.zero_grad()
        one.zero_grad()
        if loss is None:
            got, expected = ours(data(step)).square().mean(), one(data(step)).square().mean()
        else:
            got, expected = ours(data(step), target=classes()), loss(one(data(step)), classes())
        got.backward()
        expected.backward()
        assert_close(got, expected)
        assert_close(gradients(ours), gradients(one))
        assert rows_of(ours) == rows


class Slow(nn.Module):
    """Its second replica has more to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread().name.endswith("1"):
            for _ in range(len(x)):
                torch.ones(200, 200).matrix_exp()
        return self.net(x)


@pytest.mark.filterwarnings("ignore:.data_parallel. replica 1 of 2")
def test_parts_follow_the_speed() -> None:
    """With and without gradients each on its own; equal to one process all the time."""
    ours, one = pair(Slow, balance="auto")
    for step in range(12):
        assert_same_backward(ours, one, data(step, rows=40))
    assert sum(rows_of(ours)) == 40
    assert rows_of(ours)[0] > 23
    with torch.no_grad():
        assert_close(ours(data(rows=40)), one(data(rows=40)))
        assert rows_of(ours) == [20, 20]


def test_a_warning_of_replicas_that_differ() -> None:
    """Once."""
    ours, _ = pair(Slow)
    with pytest.warns(UserWarning, match="replica 1 of 2 .* times as long as replica 0") as caught:
        for step in range(20):
            ours(data(step, rows=20)).sum().backward()
    texts = [str(warning.message) for warning in caught if "data_parallel" in str(warning.message)]
    assert len(texts) == 1
    assert 'Try balance="auto"' in texts[0]
