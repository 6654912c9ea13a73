"""torchgpipe's names: GPipe, and what belongs to it."""

from __future__ import annotations

import copy
import io
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from trireme import pipelining
from trireme.pipelining import (
    GPipe,
    Namespace,
    Skippable,
    balance_by_size,
    balance_by_time,
    balance_cost,
    is_checkpointing,
    is_recomputing,
    pop,
    skippable,
    stash,
    verify_skippables,
)

from pipeline.ranks import WIDTH, rows, tanh_layers


def both(checkpoint: str = "except_last", **options: Any) -> tuple[GPipe, nn.Sequential]:
    gpipe = GPipe(tanh_layers(), [3, 3, 2], chunks=4, checkpoint=checkpoint, **options)
    return gpipe, tanh_layers()


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_gradients_are_those_of_accumulation(checkpoint: str) -> None:
    gpipe, one = both(checkpoint)
    for step in range(3):
        x, weights = rows(2 * step), rows(2 * step + 1)
        gpipe.zero_grad()
        one.zero_grad()
        gpipe(x).backward(weights)
        for piece, weight in zip(x.tensor_split(4), weights.tensor_split(4), strict=True):
            one(piece).backward(weight)
        for got, expected in zip(gpipe.parameters(), one.parameters(), strict=True):
            assert torch.equal(got.grad, expected.grad)


def test_names_and_layers_are_torchgpipes() -> None:
    gpipe, _ = both()
    assert list(gpipe.state_dict())[:2] == ["partitions.0.0.weight", "partitions.0.0.bias"]
    assert (gpipe.balance, gpipe.chunks, gpipe.checkpoint) == ([3, 3, 2], 4, "except_last")
    assert gpipe.devices == [torch.device("cpu")] * 3
    assert isinstance(gpipe.partitions[1], nn.Sequential)
    assert len(gpipe) == 8 and len(list(gpipe)) == 8
    assert gpipe[7] is gpipe[-1] is gpipe.partitions[2][1]
    with pytest.raises(IndexError):
        gpipe[8]
    with pytest.raises(AttributeError):
        getattr(GPipe(nn.Sequential(OrderedDict(a=nn.Linear(1, 1))), [1]), "a")  # noqa: B009


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({}, ValueError, "balance is required"),
        ({"balance": [8], "chunks": 0}, ValueError, "number of chunks must be positive integer"),
        ({"balance": [8], "checkpoint": "auto"}, ValueError, "'always', 'except_last', or 'never'"),
        ({"balance": [3]}, ValueError, "different length"),
        ({"balance": [9, -1]}, ValueError, "all balance numbers must be positive"),
        ({"balance": [4, 4], "devices": ["cpu"]}, IndexError, "too few devices"),
    ],
)
def test_what_torchgpipe_refuses(options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        GPipe(tanh_layers(), **options)


def test_modules_that_cannot_be_partitioned() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential"):
        GPipe(layer, [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="duplicate children"):
        GPipe(nn.Sequential(layer, layer), [1, 1])
    twice = nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))
    with pytest.raises(ValueError, match="duplicate parameters in distinct children"):
        GPipe(twice, [1, 1])


def test_moving_is_denied_and_casting_is_not() -> None:
    gpipe, _ = both()
    for move in (
        gpipe.cuda, gpipe.cpu, lambda: gpipe.to("cpu"), lambda: gpipe.to(device="cpu"),
        lambda: gpipe.to(torch.zeros(1)),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="denied to move"):
            move()
    gpipe(rows(0))
    gpipe.double()
    assert gpipe(rows(0).double()).dtype == torch.float64


def test_values_that_are_no_tensors() -> None:
    class Says(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "hello"

    for bad in ("hello", (rows(0), "hello"), 42):
        with pytest.raises(TypeError, match="expected Tensor, but got"):
            both()[0](bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected Tensor, but got str"):
        GPipe(nn.Sequential(Says()), [1])(rows(0))
    assert GPipe(nn.Sequential(), [])(torch.tensor(42)) == 42


def test_forwards_know_what_they_are() -> None:
    seen: list[tuple[bool, bool]] = []

    class Detect(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return x.tanh()

    gpipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Detect()), [2], chunks=2)
    gpipe(rows(0)).sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]
    seen.clear()
    gpipe.eval()(rows(0)).sum().backward()
    assert seen == [(False, False)] * 2


def test_hooks_of_partitions_are_called() -> None:
    gpipe, _ = both()
    seen: list[Tensor] = []
    gpipe.partitions[1].register_forward_hook(lambda module, given, output: seen.append(output))
    with torch.no_grad():
        gpipe(rows(0))
    assert len(seen) == 4 and seen[0].grad_fn is None


def test_the_others_stop_when_one_raises() -> None:
    """What is behind the failure in the row is not run, though its input is there."""

    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.1)
            self.calls += 1
            return x

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("no luck")

    counts = Counts()
    gpipe = GPipe(nn.Sequential(nn.Identity(), counts, Raises()), [1, 1, 1], chunks=8)
    with pytest.raises(ArithmeticError, match="no luck"):
        gpipe(rows(0))
    assert counts.calls < 8


def test_copies_and_pickles() -> None:
    gpipe, _ = both()
    expected = gpipe(rows(0))
    for other in (copy.deepcopy(gpipe), _saved(gpipe)):
        assert torch.equal(other(rows(0)), expected)
        other(rows(0)).sum().backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in gpipe.parameters())


def _saved(gpipe: GPipe) -> GPipe:
    file = io.BytesIO()
    torch.save(gpipe, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, GPipe)
    return loaded


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


def test_skips_cross_partitions_and_threads() -> None:
    inner, outer = Namespace(), Namespace()
    layers = [
        Down().isolate(outer), nn.Linear(WIDTH, WIDTH), Down().isolate(inner), nn.Tanh(),
        Up().isolate(inner), Up().isolate(outer),
    ]  # fmt: skip
    for balance in ([6], [1, 5], [2, 2, 2], [1] * 6):
        for checkpoint in ("always", "never"):
            gpipe = GPipe(nn.Sequential(*layers), balance, chunks=3, checkpoint=checkpoint)
            gpipe.zero_grad()
            x = rows(0).requires_grad_()
            output = gpipe(x)
            output.sum().backward()
            plain = rows(0).requires_grad_()
            middle = layers[1](plain * 2)
            expected = (middle * 2).tanh() + middle + plain
            torch.testing.assert_close(output, expected)
            (grad,) = torch.autograd.grad(expected.sum(), plain)
            torch.testing.assert_close(x.grad, grad)
    assert isinstance(layers[0], Skippable) and not isinstance(layers[1], Skippable)
    assert copy.copy(inner) == inner != outer
    assert repr(Up()) == "@skippable(Up())"


def test_skips_that_do_not_match() -> None:
    def refused(*layers: nn.Module) -> str:
        with pytest.raises(TypeError) as caught:
            verify_skippables(nn.Sequential(*layers))
        return str(caught.value)

    verify_skippables(nn.Sequential(Down(), Up()))
    assert "no module declared 'skip' as poppable but stashed" in refused(Down())
    assert "'0' declared 'skip' as poppable but it was not stashed" in refused(Up())
    text = refused(Down(), Up(), Down(), Up())
    assert "'2' redeclared 'skip' as stashable" in text
    assert "'3' redeclared 'skip' as poppable" in text
    with pytest.raises(TypeError, match="do not match"):
        GPipe(nn.Sequential(Down()), [1])


def test_balances() -> None:
    class Delay(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            time.sleep(self.seconds)
            return x

    module = nn.Sequential(*(Delay(cost / 100) for cost in (1, 2, 3, 4, 5, 6))).eval()
    assert balance_by_time(2, module, rows(0), timeout=0.0, device="cpu") == [4, 2]
    assert not module.training and not module[0].training
    widths = [nn.Linear(width, width + 1) for width in range(1, 7)]
    found = balance_by_size(2, nn.Sequential(*widths), torch.rand(7, 1), param_scale=100)
    assert found == [4, 2]
    assert balance_cost([1, 2, 3, 4, 5, 6], 2) == [4, 2]
    widths[0].weight.grad = torch.zeros_like(widths[0].weight)
    with pytest.raises(ValueError, match="already has gradient"):
        balance_by_time(2, nn.Sequential(*widths), torch.rand(7, 1))


def test_deferred_batch_norm() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    plain = copy.deepcopy(norm)
    gpipe = GPipe(nn.Sequential(norm), [1], chunks=2, deferred_batch_norm=True)
    gpipe(rows(0)).sum().backward()
    plain(rows(0))
    assert isinstance(gpipe[0], pipelining.DeferredBatchNorm)
    torch.testing.assert_close(gpipe[0].running_var, plain.running_var)
    untracked = nn.BatchNorm1d(WIDTH, track_running_stats=False)
    convert = pipelining.DeferredBatchNorm.convert_deferred_batch_norm
    assert convert(untracked) is untracked


def test_a_partition_in_place_of_another() -> None:
    gpipe = GPipe(tanh_layers(4), [2, 2], chunks=2)
    gpipe(rows(0))
    gpipe.partitions[1] = nn.Sequential(nn.Identity())
    torch.testing.assert_close(gpipe(rows(0)), gpipe.partitions[0](rows(0)))


def test_a_loss_outside_trains() -> None:
    gpipe, one = both()
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (gpipe, one)]
    for step in range(5):
        x, y = rows(2 * step), rows(2 * step + 1)
        for module, optimizer in zip((gpipe, one), optimizers, strict=True):
            optimizer.zero_grad()
            mse_loss(module(x), y).backward()
            optimizer.step()
    for got, expected in zip(gpipe.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
