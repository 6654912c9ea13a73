"""checkpoint_sequential() and checkpoint_plan(): what is recomputed, and what it leaves."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential as torchs_sequential
from trireme import CheckpointPlan, checkpoint_plan, checkpoint_sequential, measure_activations
from trireme._activation import checkpoint_sequential as sequential_module

ROWS, WIDTH = 4, 8
WHOLE = ROWS * WIDTH * 4


class Layer(nn.Module):
    """Saves four tensors, its input among them, and counts its calls in training."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        inner: Tensor = self.drop(torch.tanh(self.linear(x)).exp())
        return x + inner


def layers_of(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(count)))


def train(module: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Loss, gradients and the next random number, of a step from one seed."""
    torch.manual_seed(1)
    module.zero_grad()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = run(x).square().sum()
    loss.backward()
    return [loss, x.grad, *(p.grad for p in module.parameters()), torch.rand(())]


def calls_of(module: nn.Sequential) -> list[int]:
    found = [layer.calls for layer in module]
    for layer in module:
        layer.calls = 0
    return found


def assert_equal(ours: list[Tensor], plain: list[Tensor]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("segments", [1, 2, 3, 5, 7, "sqrt"])
def test_segments_are_those_of_torch(segments: int | str) -> None:
    module = layers_of(7)
    plain = train(module, module)
    calls_of(module)
    number = 3 if segments == "sqrt" else segments
    torchs = train(module, lambda x: torchs_sequential(module, number, x, use_reentrant=False))
    calls = calls_of(module)
    assert_equal(train(module, lambda x: checkpoint_sequential(module, segments, x)), plain)
    assert calls_of(module) == calls
    assert_equal(torchs, plain)


def test_a_list_of_functions_and_options() -> None:
    module = layers_of(4)
    plain = train(module, module)
    functions = [module[0], lambda x: module[1](x), module[2].forward, module[3]]
    assert_equal(train(module, lambda x: checkpoint_sequential(functions, 2, x)), plain)
    without = train(module, lambda x: checkpoint_sequential(module, 2, x, preserve_rng_state=False))
    assert not torch.equal(without[1], plain[1])
    twice = nn.Sequential(module[0], module[0])  # the layer is in the sequence twice
    assert_equal(train(twice, lambda x: checkpoint_sequential(twice, 2, x)), train(twice, twice))


def budget_for(module: nn.Sequential, recomputed: int) -> int:
    """What is held where that many of equal layers are recomputed."""
    costs = measure_activations(module, torch.randn(ROWS, WIDTH, requires_grad=True))
    return sum(cost.bytes for cost in costs) - recomputed * (costs[1].bytes - costs[1].kept)


def test_auto_recomputes_as_many_as_the_budget_asks_for() -> None:
    module = layers_of(6)
    plain = train(module, module)
    calls_of(module)
    for recomputed in (0, 1, 3):
        budget = budget_for(module, recomputed)
        calls_of(module)

        def run(x: Tensor, budget: int = budget) -> Any:
            return checkpoint_sequential(module, "auto", x, budget_bytes=budget)

        assert_equal(train(module, run), plain)
        assert sorted(calls_of(module), reverse=True) == [3] * recomputed + [2] * (6 - recomputed)
        assert_equal(train(module, run), plain)  # measured once
        assert sorted(calls_of(module), reverse=True) == [2] * recomputed + [1] * (6 - recomputed)


def test_auto_measures_again_when_something_else_is_saved() -> None:
    module = layers_of(4)
    budget = budget_for(module, 1)
    measured: list[int] = []

    def run(rows: int = ROWS, **options: Any) -> None:
        calls_of(module)
        x = torch.randn(rows, WIDTH, requires_grad=True)
        checkpoint_sequential(module, "auto", x, budget_bytes=budget, **options)
        measured.append(max(calls_of(module)) - 1)

    run()
    run()
    run(rows=2)
    module.eval()
    run()
    module[1].requires_grad_(False)
    run()
    with torch.autocast("cpu", torch.bfloat16):
        run()
        run()
    run()
    assert measured == [1, 0, 1, 1, 1, 1, 0, 0]
    with torch.no_grad():
        module.train()
        run()
    assert measured[-1] == 0


def test_what_was_chosen_goes_with_the_layers() -> None:
    module = layers_of(3)
    known = len(sequential_module._choices)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    checkpoint_sequential(module, "auto", x, budget_bytes=10**6)
    checkpoint_sequential(list(module), "auto", x, budget_bytes=10**6)
    assert len(sequential_module._choices) == known + 2
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert len(sequential_module._choices) == known


def test_auto_of_plain_functions() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    functions = [torch.exp, torch.sin, torch.exp]
    loss = checkpoint_sequential(functions, "auto", x, budget_bytes=3 * WHOLE).sum()
    plain = x.exp().sin().exp().sum()
    assert torch.equal(*torch.autograd.grad(loss, x), *torch.autograd.grad(plain, x))


def sequential(*arguments: Any, **options: Any) -> Any:
    return checkpoint_sequential(layers_of(3), *arguments, **options)


X = torch.ones(ROWS, WIDTH, requires_grad=True)
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: sequential(0, X), ValueError, "got 0 segments, expected 1 to 3"),
    (lambda: sequential(4, X), ValueError, "got 4 segments, expected 1 to 3"),
    (lambda: sequential("half", X), ValueError, "got segments='half', expected a number"),
    (lambda: sequential(1.5, X), TypeError, "segments is float, expected int or str"),
    (lambda: sequential(True, X), TypeError, "segments is bool"),
    (lambda: sequential("auto", X), ValueError, 'got segments="auto" without budget_bytes'),
    (lambda: sequential(2, X, budget_bytes=9), ValueError, 'expected a budget with "auto" only'),
    (lambda: sequential("auto", X, budget_bytes=9), ValueError, "got a budget of 9 bytes, expe"),
    (lambda: sequential("auto", X, budget_bytes=9.5), TypeError, "budget_bytes is float"),
    (lambda: sequential(1, X, retain=True), ValueError, "got retain, expected options of"),
    (lambda: sequential(2, X, use_reentrant=True), ValueError, "got use_reentrant=True"),
    (lambda: checkpoint_plan([{"bytes": 1}], 9), ValueError, "layer 0 has ['bytes'], expected"),
    (
        lambda: checkpoint_plan([{"bytes": 1, "time": 1, "seconds": 2}], 9),
        ValueError,
        "layer 0 has ['bytes', 'seconds', 'time']",
    ),
    (lambda: checkpoint_plan([(1, 2)], 9), TypeError, "layer 0 is tuple"),  # type: ignore[list-item]
    (lambda: checkpoint_plan([{"bytes": 1.5, "time": 1}], 9), TypeError, "bytes is float"),
    (lambda: checkpoint_plan([{"bytes": 1, "time": "1"}], 9), TypeError, "time is str"),
    (lambda: checkpoint_plan([{"bytes": -1, "time": 1}], 9), ValueError, "layer 0 has -1 bytes"),
    (lambda: checkpoint_plan([], 0.5), TypeError, "budget_bytes is float"),  # type: ignore[arg-type]
    (
        lambda: checkpoint_plan([{"bytes": 5, "time": 1, "kept": 2}, {"bytes": 9, "time": 1}], 10),
        ValueError,
        "got a budget of 10 bytes, expected at least 11",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_what_is_refused(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    said = str(raised.value).split("\nException raised from")[0]
    assert said.startswith("[checkpoint] ") and text in said


def test_a_plan_is_a_value() -> None:
    layers = [
        {"bytes": 100, "time": 1},
        {"bytes": 100, "time": 5, "kept": 30},
        {"bytes": 50, "time": 2},
    ]
    assert checkpoint_plan(layers, 250) == CheckpointPlan((False,) * 3, 250, 0.0)
    assert checkpoint_plan(layers, 249) == CheckpointPlan((True, False, False), 150, 1.0)
    assert checkpoint_plan(layers, 100) == CheckpointPlan((True, True, False), 100, 6.0)
    assert checkpoint_plan([], 0) == CheckpointPlan((), 0, 0.0)


def test_a_plan_takes_what_was_measured() -> None:
    module = copy.deepcopy(layers_of(5))
    costs = measure_activations(module, torch.randn(ROWS, WIDTH))
    budget = sum(cost.bytes for cost in costs) * 2 // 3
    plan = checkpoint_plan(costs, budget)
    assert plan == checkpoint_plan([asdict(cost) for cost in costs], budget)
    assert 0 < sum(plan.recompute) < 5
    assert plan.extra_time == sum(
        cost.time for cost, again in zip(costs, plan.recompute, strict=True) if again
    )


def test_the_public_names() -> None:
    for name in ("checkpoint_plan", "CheckpointPlan", "LayerCost", "measure_activations"):
        assert name in trireme.__all__
