"""Replicas of DataParallel compute as their caller does: modes, hooks, checkpoints, threads."""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from data_parallel.cases import (
    DP,
    SINGLE,
    TIME_LIMIT,
    Called,
    assert_close,
    assert_same_backward,
    pair,
    square_mean,
)
from harness.models import batch, mlp
from harness.training import gradients, values

pytestmark = TIME_LIMIT

Checkpoint = Callable[..., Any]
CHECKPOINTS = {
    "torch's": partial(checkpoint, use_reentrant=False),
    "torch's reentrant": partial(checkpoint, use_reentrant=True),
    "ours": trireme.checkpoint,
}


def make() -> nn.Module:
    return mlp(torch.float64)


def data(step: int = 0) -> Tensor:
    return batch(step, rows=7, dtype=torch.float64)


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), mlp()).double()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    """Also as the first use of all, before the module trains."""
    ours, one = (module.eval() for module in pair(normed))
    seen: list[Any] = []
    handle = ours.module[1].register_forward_hook(
        lambda *_: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    )
    with mode():
        output = ours(data())
        assert_close(output, one(data()))
    handle.remove()
    assert not output.requires_grad
    assert output.is_inference() == (mode is torch.inference_mode)
    assert seen == [(False, mode is torch.inference_mode)] * 2
    assert_same_backward(ours, one, data(1))
    with mode():
        assert_close(ours(data(2)), one(data(2)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_after_a_first_use_without_gradients(mode: Any) -> None:
    """Replicas' buffers are written by both."""
    ours = DP(normed(), replicas=2)
    for step in range(2):
        with mode():
            ours(data(step))
        ours(data(step)).sum().backward()
        assert all(grad is not None for grad in gradients(ours).values())


def test_eval_and_train() -> None:
    ours, one = pair(lambda: nn.Sequential(make(), nn.Dropout(1.0)))
    assert not ours(data()).any()
    assert_close(ours.eval()(data()), one.eval()(data()))
    ours.module[1].train()
    assert not ours(data()).any()


def test_dropout_differs_between_replicas_and_steps() -> None:
    ours = DP(nn.Dropout(0.5), replicas=2)
    outputs = [ours(torch.ones(2, 200)) for _ in range(2)]
    assert len({tuple(row.tolist()) for output in outputs for row in output}) == 4


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache: bool) -> None:
    ours, one = pair(mlp)
    x, rough = batch(0, rows=7), {"rtol": 0.05, "atol": 0.01}
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        outputs = [module(x) for module in (ours, one)]
        assert [output.dtype for output in outputs] == [torch.bfloat16] * 2
    for output in outputs:
        output.float().square().mean().backward()
    assert_close(gradients(ours), gradients(one), **rough)
    assert ours.module[0].weight.grad.dtype == torch.float32
    # It ends with its block.
    assert_same_backward(ours, one, x, tolerance=SINGLE)


def test_context_variables() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    seen: list[int] = []
    DP(Called(lambda m, x: (seen.append(variable.get()), x)[1]), replicas=2)(data())
    assert seen == [5, 5]


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes() -> None:
    ours, _ = pair(make, 3)
    ours(data())
    with Operators() as mode:
        ours(data())
    assert mode.seen.count("aten::addmm") == 2 * 3, "layers with a bias, replicas"


@pytest.mark.parametrize("again", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoints_in_the_module(again: Checkpoint) -> None:
    calls: list[int] = []

    def part(module: Any, x: Tensor) -> Tensor:
        calls.append(0)
        return module.net(x).tanh()

    def forward(module: Any, x: Tensor) -> Tensor:
        hidden = again(part, module, module.first(x))
        return again(part, module, hidden.repeat(1, 2))

    ours, one = pair(lambda: Called(forward, first=nn.Linear(6, 6).double(), net=make()))
    for step in range(2):
        assert_same_backward(ours, one, data(step))
    assert len(calls) == 2 * (2 + 1) * 2 * 2, "steps, modules, parts, times"


@pytest.mark.parametrize("again", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_around_it(again: Checkpoint, inside: bool) -> None:
    """They may be in it as well."""

    def forward(module: Any, x: Tensor) -> Tensor:
        return again(module.net, x) if inside else module.net(x)

    modules = pair(lambda: Called(forward, net=make()))
    for step in range(2):
        seen = []
        for module in modules:
            module.zero_grad()
            x = data(step).requires_grad_()
            hidden = again(module, x)
            (square_mean(hidden) + square_mean(again(module, x * 2))).backward()
            seen.append([hidden, x.grad, gradients(module)])
        assert_close(*seen)


def test_saved_tensors_on_the_cpu() -> None:
    ours, one = pair(make)
    with torch.autograd.graph.save_on_cpu():
        assert_same_backward(ours, one, data())
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(threading.get_ident()) or tensor, lambda tensor: tensor
    ):
        assert_same_backward(ours, one, data())
    assert len(set(packed) - {threading.get_ident()}) == 2


def test_compiled_around() -> None:
    """The replicas run as they are: compiled code is for the thread that asked for it."""
    ours, one = pair(make)
    compiled = torch.compile(ours, backend="eager")
    for step in range(2):
        ours.zero_grad()
        square_mean(compiled(data(step))).backward()
        one.zero_grad()
        square_mean(one(data(step))).backward()
        assert_close(gradients(ours), gradients(one))


def test_a_profile_of_the_replicas() -> None:
    ours, _ = pair(make, 3)
    ours(data()).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours(data()).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::addmm"] == 2 * 3, "layers with a bias, replicas"
    assert counts["AddmmBackward0"] == 2 * 3
    assert counts["trireme::data_parallel.forward"] == 1
    assert counts["trireme::data_parallel.backward"] == 1


def test_hooks_of_layers_run_once_per_replica() -> None:
    calls: list[str] = []
    shapes: list[int] = []

    def count(name: str) -> Any:
        def hook(module: nn.Module, *_: Any) -> None:
            calls.append(name)

        return hook

    ours, one = pair(make, 3)
    for layer in (ours.module, ours.module[2]):
        layer.register_forward_pre_hook(count("before"))
        layer.register_forward_hook(count("after"))
        layer.register_full_backward_pre_hook(count("before backward"))
        layer.register_full_backward_hook(count("after backward"))
    ours.module[0].register_forward_hook(lambda m, x, y: shapes.append(len(y)))
    ours.register_forward_hook(count("of the whole"))
    ours.register_full_backward_hook(count("of the whole, backward"))
    assert_same_backward(ours, one, data().requires_grad_())
    assert sorted(shapes) == [1, 3, 3]
    assert Counter(calls) == {
        **dict.fromkeys(("before", "after", "before backward", "after backward"), 2 * 3),
        **dict.fromkeys(("of the whole", "of the whole, backward"), 1),
    }


def test_hooks_that_change_what_passes() -> None:
    ours, one = pair(make)
    for module in (ours.module, one):
        module[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        module[1].register_forward_hook(lambda m, args, y: y + 1)
        module[2].register_full_backward_hook(lambda m, grads, _: (grads[0] * 3,))
    assert_same_backward(ours, one, data())


def test_hooks_come_and_go() -> None:
    calls: list[int] = []
    ours, _ = pair(make)
    ours(data())
    handle = ours.module[0].register_forward_hook(lambda *_: calls.append(0))
    ours(data())
    handle.remove()
    ours(data())
    assert len(calls) == 2


class CountThreads(torch.autograd.Function):
    """Adds how many threads there are to compute with to `counts`, forward and backward."""

    counts: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CountThreads.counts.append(torch.get_num_threads())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        CountThreads.counts.append(torch.get_num_threads())
        return grad


@pytest.mark.parametrize(
    ("threads", "replicas", "each"),
    [(1, 2, [1, 1]), (2, 2, [1, 1]), (4, 2, [2, 2]), (6, 3, [2] * 3)],
)
def test_threads_are_shared_out(threads: int, replicas: int, each: list[int]) -> None:
    """The caller has as many as before."""
    torch.set_num_threads(threads)
    CountThreads.counts.clear()
    ours = DP(Called(lambda m, x: CountThreads.apply(m.net(x)), net=make()), replicas=replicas)
    for step in range(2):
        ours(data(step)).sum().backward()
        assert torch.get_num_threads() == threads
    assert CountThreads.counts == each * 4
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert others == [threads]


def test_forward_from_another_thread() -> None:
    ours, one = pair(make)
    seen: list[Any] = []

    def work() -> None:
        assert_same_backward(ours, one, data())
        with torch.no_grad():
            ours(data())
        seen.append(values(ours))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert_same_backward(ours, one, data(1))
    assert len(seen) == 2


def test_a_backward_in_another_thread() -> None:
    ours, one = pair(make)
    loss = square_mean(ours(data()))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    square_mean(one(data())).backward()
    assert_close(gradients(ours), gradients(one))
