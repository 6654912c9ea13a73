"""What goes wrong in a replica of DataParallel reaches the caller, and the next step works."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.cases import (
    DP,
    HOUSE_FORM,
    TIME_LIMIT,
    Called,
    assert_close,
    assert_same_backward,
    pair,
    square_mean,
)
from harness.faults import message_of
from harness.models import batch, mlp
from harness.training import gradients

pytestmark = TIME_LIMIT

LATE_S = 30.0  # what nobody ends is long
HAS_NOTES = sys.version_info >= (3, 11)


def data(step: int = 0) -> Tensor:
    return batch(step, rows=8, dtype=torch.float64)


def with_a_nine_in(*rows: int) -> Tensor:
    """There are 8 rows; the first 4 are those of replica 0."""
    x = data()
    x[list(rows), 0] = 9
    return x


class Odd(ArithmeticError):
    """With more to it than a text."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.second = second


def look_for_nines(x: Tensor) -> None:
    if (x == 9).any():
        raise Odd(8, 9)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        look_for_nines(ctx.saved_tensors[0])
        return grad, None


def in_forward(module: Any, x: Tensor) -> Tensor:
    look_for_nines(x)
    return module.net(x)


def in_backward(module: Any, x: Tensor) -> Tensor:
    return module.net(RaisesInBackward.apply(module.net[0].weight.sum(), x) * x)


def in_hook(module: Any, x: Tensor) -> Tensor:
    y = module.net(x)
    if y.requires_grad:
        y.register_hook(lambda grad: look_for_nines(x))
    return y


def make(function: Callable[..., Any]) -> nn.Module:
    return Called(function, net=mlp(torch.float64))


def assert_named(error: BaseException, replica: int, where: str) -> None:
    """Where Python has notes."""
    if HAS_NOTES:
        assert error.__notes__ == [
            f"[data_parallel] in the {where} of replica {replica} of 2 (cpu)"
        ]


@pytest.mark.parametrize("replica", [0, 1])
def test_in_forward(replica: int) -> None:
    ours, one = pair(lambda: make(in_forward))
    for step in range(3):
        with pytest.raises(Odd, match="8 and 9") as caught:
            ours(with_a_nine_in(4 * replica + 1))
        assert caught.value.second == 9
        text = "".join(traceback.format_exception(caught.value))
        assert "in look_for_nines" in text
        assert "in in_forward" in text
        assert_named(caught.value, replica, "forward")
        assert_same_backward(ours, one, data(step))


def test_in_an_operator() -> None:
    """An error of torch's own."""
    ours, one = pair(
        lambda: Called(lambda m, x: m.net(x[:, : 5 if (x == 9).any() else 6]), net=mlp())
    )
    x = with_a_nine_in(6).float()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        ours(x)
    assert_named(caught.value, 1, "forward")
    assert_same_backward(ours, one, data().float(), tolerance={"rtol": 1e-4, "atol": 1e-5})


def test_in_all_replicas() -> None:
    ours, one = pair(lambda: make(in_forward))
    for step in range(3):
        with pytest.raises(Odd):
            ours(with_a_nine_in(0, 7))
        assert_same_backward(ours, one, data(step))


def test_in_the_loss() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        look_for_nines(target)
        return square_mean(output - target[:, :3])

    ours, one = pair(lambda: mlp(torch.float64), loss=loss)
    with pytest.raises(Odd) as caught:
        ours(data(), target=with_a_nine_in(5))
    assert_named(caught.value, 1, "forward")
    ours(data(), target=data(1)).backward()
    loss(one(data()), data(1)).backward()
    assert_close(gradients(ours), gradients(one))


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("function", [in_backward, in_hook])
def test_in_backward(function: Any, replica: int) -> None:
    """No gradient arrives, in the caller's own part of the graph neither."""
    ours, one = pair(lambda: make(function))
    for step in range(3):
        ours.zero_grad()
        x = with_a_nine_in(4 * replica + 2).requires_grad_()
        loss = square_mean(ours(x))
        with pytest.raises(Odd, match="8 and 9") as caught:
            loss.backward()
        text = "".join(traceback.format_exception(caught.value))
        assert "in look_for_nines" in text
        assert_named(caught.value, replica, "backward")
        assert x.grad is None
        assert all(grad is None for grad in gradients(ours).values())
        assert_same_backward(ours, one, data(step))


def test_in_backward_of_all_replicas() -> None:
    ours, one = pair(lambda: make(in_backward))
    with pytest.raises(Odd):
        square_mean(ours(with_a_nine_in(0, 1, 6))).backward()
    assert_same_backward(ours, one, data())


def test_gradients_from_before_stay() -> None:
    ours, one = pair(lambda: make(in_backward))
    assert_same_backward(ours, one, data())
    with pytest.raises(Odd):
        square_mean(ours(with_a_nine_in(3))).backward()
    assert_close(gradients(ours), gradients(one))


def test_an_error_of_autograd() -> None:
    """It names its replica where Python has no notes, too."""

    def forward(module: Any, x: Tensor) -> Tensor:
        y = module.net(x).exp()
        if (x == 9).any():
            y.detach().zero_()
        return y

    ours, one = pair(lambda: make(forward))
    loss = square_mean(ours(with_a_nine_in(7)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        loss.backward()
    assert "[data_parallel] in the backward of replica 1 of 2 (cpu)" in str(caught.value)
    assert_same_backward(ours, one, data())


def test_many_failures() -> None:
    """None leaves anything for the next step: not in forward, not in backward."""
    ours, one = pair(lambda: make(lambda m, x: (look_for_nines(x), in_backward(m, x))[1]))
    expected = one(data()).detach()
    for number in range(100):
        x = data()
        x[number % 8, 0] = 9
        with pytest.raises(Odd):
            ours(x)
        output = ours(data())
        assert_close(output.detach(), expected)
        if number % 10 == 0:
            assert_same_backward(ours, one, data())


def test_the_others_are_stopped() -> None:
    """At their next line of Python."""
    waits = threading.Event()
    ended: list[str] = []

    def forward(module: Any, x: Tensor) -> Tensor:
        if (x == 9).any():
            waits.wait(LATE_S)
            raise Odd(8, 9)
        if (x == 7).any():
            try:
                waits.set()
                while True:
                    time.sleep(0.01)
            finally:
                ended.append("cleaned up")
        return module.net(x)

    ours, one = pair(lambda: make(forward))
    x = with_a_nine_in(5)
    x[0, 0] = 7
    with pytest.raises(Odd):
        ours(x)
    assert ended == ["cleaned up"]
    assert_same_backward(ours, one, data())


def test_the_others_are_stopped_in_backward() -> None:
    """At their next parameter."""
    arrived: list[int] = []
    has_failed = threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
            ctx.fails = bool((rows == 9).any())
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            if ctx.fails:
                has_failed.set()
                raise Odd(8, 9)
            has_failed.wait(LATE_S)
            time.sleep(0.1)
            return grad, None

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            arrived.append(len(grad))
            return grad

    def forward(module: Any, x: Tensor) -> Tensor:
        hidden = Counts.apply(module.first(x))
        for factor in module.factors if fails else ():
            hidden = Waits.apply(hidden * factor, x)
        return hidden

    # The other one has 20 s to hear of it: at any of these parameters.
    factors = nn.ParameterList(torch.ones(6).double() for _ in range(200))
    ours = DP(Called(forward, first=nn.Linear(6, 6).double(), factors=factors), replicas=2)
    fails = True
    loss = square_mean(ours(with_a_nine_in(0)))
    with pytest.raises(Odd):
        loss.backward()
    assert arrived == []
    fails = False
    square_mean(ours(data())).backward()
    assert arrived == [4, 4]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception(kind: Any) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        if (x == 9).any():
            raise kind()
        return module.net(x)

    ours, one = pair(lambda: make(forward))
    with pytest.raises(kind):
        ours(with_a_nine_in(4))
    assert_same_backward(ours, one, data())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_second_derivatives() -> None:
    ours, one = pair(lambda: mlp(torch.float64))
    x = data().requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph=True") as caught:
        torch.autograd.grad(square_mean(ours(x)), [x], create_graph=True)
    assert HOUSE_FORM.match(message_of(caught.value))
    assert "Use trireme.data_parallel" in str(caught.value)
    with pytest.raises(NotImplementedError):
        square_mean(ours(x)).backward(create_graph=True)
    ours.zero_grad()
    assert_same_backward(ours, one, data())


def test_a_second_backward() -> None:
    ours, _ = pair(lambda: mlp(torch.float64))
    output = ours(data())
    output.sum().backward()
    before = gradients(ours)
    with pytest.raises(RuntimeError, match="second backward") as caught:
        output.sum().backward()
    assert HOUSE_FORM.match(message_of(caught.value))
    assert "retain_graph=True" in str(caught.value)
    assert_close(gradients(ours), before, rtol=0.0, atol=0.0)


def test_its_own_forward_in_a_replica() -> None:
    """Raises or works, but does not wait for itself."""
    kept: list[Any] = []

    def forward(module: Any, x: Tensor) -> Tensor:
        if len(x) == 4:
            kept[0](x[:2])
        return module.net(x)

    ours, one = pair(lambda: make(forward))
    kept.append(ours)
    with pytest.raises((ValueError, RuntimeError), match="data_parallel") as caught:
        ours(data())
    assert HOUSE_FORM.match(message_of(caught.value))
    assert_close(ours(data()[:6]), one(data()[:6]))
    kept.clear()


def test_two_forwards_at_once() -> None:
    began, may_end = threading.Event(), threading.Event()

    def forward(module: Any, x: Tensor) -> Tensor:
        if (x == 7).any():
            began.set()
            may_end.wait(LATE_S)
        return module.net(x)

    ours, one = pair(lambda: make(forward))
    x = data()
    x[0, 0] = 7
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: ours(x).detach())
        began.wait(LATE_S)
        second = threads.submit(lambda: ours(data()).detach())
        may_end.set()
    assert_close([first.result(), second.result()], [one(x).detach(), one(data()).detach()])
    assert_same_backward(ours, one, data())


def test_threads_that_were_stopped() -> None:
    """Although an exception is kept, whose frames are theirs."""
    before = set(threading.enumerate())
    ours = DP(make(in_forward), replicas=2)
    with pytest.raises(Odd) as caught:
        ours(with_a_nine_in(1))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    ours._threads.pool.stopper()()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(ValueError, match="threads of the replicas were stopped") as stopped:
        ours(data())
    assert HOUSE_FORM.match(message_of(stopped.value))
    assert caught.value.second == 9
