"""DataParallel and the life of its process: Ctrl-C, the end of the interpreter, forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.cases import TIME_LIMIT, Called, assert_same_backward, pair, square_mean
from harness.interpreters import Interpreter, run_interpreters
from harness.models import batch, mlp
from harness.ranks import run_ranks

pytestmark = TIME_LIMIT


def data(step: int = 0) -> Tensor:
    return batch(step, rows=8, dtype=torch.float64)


class CtrlC:
    """Is pressed by the first replica that comes to where it waits."""

    def __init__(self) -> None:
        self.pressed = threading.Lock()
        self.passed: list[int] = []

    def press(self) -> None:
        if self.pressed.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)

    def wait_for_ever(self) -> None:
        self.press()
        while True:  # a line of Python after the other, as it is in anybody's forward
            time.sleep(0.01)


class WaitsInBackward(torch.autograd.Function):
    """Counts how often: what waits for the signal has 20 s to notice it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ctrl_c: CtrlC) -> Tensor:
        ctx.ctrl_c = ctrl_c
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.ctrl_c.press()
        ctx.ctrl_c.passed.append(len(grad))
        time.sleep(0.1)
        return grad, None


def waiting_where_told(module: Any, x: Tensor, where: str, ctrl_c: Any = None) -> Tensor:
    if where == "forward" or (where == "one forward" and torch.equal(x[0], data()[0])):
        ctrl_c.wait_for_ever()
    x = module.net(x)
    if where == "backward":
        for factor in module.factors:
            x = WaitsInBackward.apply(x * factor, ctrl_c)
    return x


FACTORS = 200


def waiting() -> nn.Module:
    ones = [torch.ones((), dtype=torch.float64) for _ in range(FACTORS)]
    return Called(waiting_where_told, net=mlp(torch.float64), factors=nn.ParameterList(ones))


def interrupted(rank: int, where: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    ours, one = pair(waiting)
    for step in range(2):
        assert_same_backward(ours, one, data(step), where="")
        ctrl_c = CtrlC()
        with pytest.raises(KeyboardInterrupt):
            square_mean(ours(data(), where=where, ctrl_c=ctrl_c)).backward()
        assert len(ctrl_c.passed) < FACTORS  # each replica has as many
        ours.zero_grad()
    assert_same_backward(ours, one, data(2), where="")


@pytest.mark.parametrize("where", ["forward", "one forward", "backward"])
def test_ctrl_c(where: str) -> None:
    """Ends forward at a line of Python, backward at a parameter; the next step works."""
    run_ranks(interrupted, 1, where)


def forking(rank: int) -> None:
    ours, one = pair(lambda: mlp(torch.float64))
    assert_same_backward(ours, one, data())
    loss = square_mean(ours(data()))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(ValueError, match="forked child"):
                loss.backward()
            for step in range(2):
                assert_same_backward(ours, one, data(step))
            code = 0
        finally:
            os._exit(code)
    loss.backward()
    assert_same_backward(ours, one, data(1))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_fork_after_use() -> None:
    """The child makes threads of its own; a graph of the parent's raises in it.

    In a fresh process: autograd refuses children once a deep backward has started threads.
    """
    run_ranks(forking, 1, fresh=True)


PROGRAM = """
import threading
import torch, trireme
import torch.utils.checkpoint
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x, inside=None):
        if inside is not None:
            inside.set()
            threading.main_thread().join()  # until the interpreter ends
        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)

dp = trireme.DataParallel(Net(), replicas=3)
x = torch.ones(7, 6)
dp(x).sum().backward()
{last}
"""

ENDS = {
    "graphs alive": "import builtins\nkept = [dp, dp(x)]\nkept.append(kept)\nbuiltins.kept = kept",
    "a graph of one that is gone": "kept = dp(x)\ndel dp",
    "in forward": (
        "inside = threading.Event()\nthreading.Thread(target=dp, args=(x, inside)).start()\n"
        "assert inside.wait(20)\nraise SystemExit(5)"
    ),
}


def test_the_end_of_the_interpreter() -> None:
    """Nothing crashes, waits or talks: with graphs alive, after an error, while replicas work."""
    programs = [Interpreter(PROGRAM.format(last=last)) for last in ENDS.values()]
    for name, ended in zip(ENDS, run_interpreters(programs, timeout=90), strict=True):
        assert ended == (5 if name == "in forward" else 0, "", ""), name
