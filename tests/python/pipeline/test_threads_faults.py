"""What a pipeline in one process tells of errors, and programs that are no scripts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.interpreters import Interpreter, run_interpreters
from pipeline.ranks import WIDTH, rows, tanh_layers

CHUNKS = 4


class Luckless(nn.Module):
    """Raises in one of its calls, or in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bad_call = 0
        self.fails_backward = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.bad_call:
            raise ArithmeticError("no luck")
        y = x.tanh()
        if self.fails_backward:
            y.register_hook(self.fail)
        return y

    def fail(self, _: Tensor) -> None:
        raise ArithmeticError("no luck")


def by_step(pipe: trireme.Pipeline) -> None:
    pipe.step(rows(0), target=rows(1))


def by_pass(pipe: trireme.Pipeline) -> None:
    mse_loss(pipe(rows(0)), rows(1)).backward()


@pytest.mark.parametrize("run", [by_step, by_pass])
@pytest.mark.parametrize("moment", ["forward", "recomputation", "backward"])
def test_errors_say_stage_and_micro_batch(
    moment: str, run: Callable[[trireme.Pipeline], None]
) -> None:
    layer = Luckless()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    checkpoint: Any = "always" if moment == "recomputation" else "never"
    pipe = trireme.Pipeline(net, CHUNKS, balance=[1, 1, 1], loss=mse_loss, checkpoint=checkpoint)
    run(pipe)
    expected = [parameter.grad.clone() for parameter in pipe.parameters()]
    pipe.zero_grad()
    layer.calls, layer.fails_backward = 0, moment == "backward"
    layer.bad_call = {"forward": 3, "recomputation": CHUNKS + 2, "backward": 0}[moment]
    where = {
        "forward": "[pipeline] in stage 1 (layer 1), micro-batch 2",
        "recomputation": "[pipeline] in stage 1 (layer 1), micro-batch 1",
        "backward": "[pipeline] raised in the backward of micro-batch 0 of stage 1 (layer 1)",
    }
    with pytest.raises(ArithmeticError, match="no luck") as caught:
        run(pipe)
    assert where[moment] in caught.value.__notes__
    assert all(parameter.grad is None for parameter in pipe.parameters())
    layer.bad_call, layer.fails_backward = 0, False
    run(pipe)
    for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_loss_that_raises_once() -> None:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("wrong")
        return mse_loss(output, target)

    pipe = trireme.Pipeline(tanh_layers(), CHUNKS, devices=["cpu"] * 2, loss=loss)
    with pytest.raises(KeyError, match="wrong") as caught:
        by_step(pipe)
    assert caught.value.__notes__ == ["[pipeline] in stage 1 (layers 4..7), micro-batch 1"]
    assert all(parameter.grad is None for parameter in pipe.parameters())
    by_step(pipe)


def test_two_pipelines_at_a_time() -> None:
    """Each on threads of its own, called from threads of their own."""
    pipes = [trireme.Pipeline(tanh_layers(), CHUNKS, balance=[3, 5], loss=mse_loss) for _ in "ab"]
    alone = trireme.Pipeline(tanh_layers(), CHUNKS, balance=[3, 5], loss=mse_loss)
    for _ in range(3):
        by_step(alone)
        by_pass(alone)
    errors: list[BaseException] = []

    def train(pipe: trireme.Pipeline) -> None:
        try:
            for _ in range(3):
                by_step(pipe)
                by_pass(pipe)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(pipe,)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for pipe in pipes:
        for got, expected in zip(pipe.parameters(), alone.parameters(), strict=True):
            assert torch.equal(got.grad, expected.grad)


# What runs the cells of a notebook: a loop of events, in which each is compiled by itself, with
# classes that no file has.
_NOTEBOOK = '''
import asyncio

CELLS = [
    """
import torch, trireme
from torch import nn
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        if x.isnan().any():
            raise ArithmeticError("no number")
        return self.linear(x).tanh()
pipe = trireme.Pipeline(nn.Sequential(*(Layer() for _ in range(4))), 4, devices=["cpu"] * 2)
""",
    "pipe(torch.full((8, 4), float('nan')))",
    "pipe(torch.ones(8, 4)).sum().backward()",
    # The cell is run again, while the pipeline before is still there.
    "before = pipe; pipe = trireme.Pipeline(nn.Sequential(Layer(), Layer()), 4, balance=[1, 1])",
    "pipe(torch.ones(8, 4)).sum().backward(); before(torch.ones(8, 4)).sum().backward()",
]

async def main():
    names = {"__name__": "__main__"}
    for number, cell in enumerate(CELLS):
        try:
            exec(compile(cell, f"<cell {number}>", "exec"), names)
        except Exception as error:
            print(number, type(error).__name__, error)
        await asyncio.sleep(0)
    print(all(one.grad is not None for one in names["pipe"].parameters()))

asyncio.run(main())
'''


def test_in_a_notebook() -> None:
    ((code, printed, errors),) = run_interpreters([Interpreter(_NOTEBOOK)])
    assert code == 0, errors
    assert printed.split("\n")[:-1] == ["1 ArithmeticError no number", "True"]


def test_a_loss_without_a_graph_raises() -> None:
    """As torch's backward does, unless a layer's part of the loss has one."""
    net = tanh_layers()
    detached = trireme.Pipeline(
        net, CHUNKS, balance=[3, 5], loss=lambda output, target: mse_loss(output.detach(), target)
    )
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        by_step(detached)
    assert all(parameter.grad is None for parameter in net.parameters())

    class Penalty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            trireme.pipeline_loss(x.square().mean())
            return x

    partly = trireme.Pipeline(
        nn.Sequential(net[0], Penalty(), *net[1:]),
        CHUNKS,
        balance=[3, 6],
        loss=lambda output, target: mse_loss(output.detach(), target),
    )
    by_step(partly)
    assert net[0].weight.grad is not None
