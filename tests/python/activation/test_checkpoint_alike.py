"""Where checkpoints differ from plain calls ours do what torch's do: who runs when, how often."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import trireme
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode

from activation.programs import (
    TORCH,
    Again,
    Program,
    Values,
    assert_same_bits,
    gradients,
    leaves,
    net,
    ours,
    run,
    torchs,
    waves,
)

PROGRAMS: list[Program] = []


def alike(program: Program) -> Program:
    PROGRAMS.append(program)
    return program


@alike
def the_end_of_recomputations(again: Again) -> Values:
    """As early as possible, or late, and what a context says of it counts more."""
    (x,), tails = leaves(1), []
    for context in (None, True, False):
        for early_stop in (True, False):

            def function(x: Tensor, case: Any = (context, early_stop)) -> Tensor:
                result = x.exp()
                tails.append(case)
                return result

            chosen = nullcontext()
            if context is not None:
                chosen = torch.utils.checkpoint.set_checkpoint_early_stop(context)
            with chosen:
                output = again(function, x, early_stop=early_stop)
            output.sum().backward()
    return tails


@alike
def numbers_of_calls(again: Again) -> Values:
    """Parts of a graph, nested checkpoints, second derivatives: who is called how often."""
    (x,), calls = leaves(1), []

    def counted(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            calls.append(name)
            return function(x)

        return call

    def outer(x: Tensor) -> Tensor:
        inner = again(counted("inner", waves), x)
        return again(counted("other", waves), inner).exp()

    output = again(counted("outer", outer), x).sum()
    output.backward(retain_graph=True)
    grad(grad(output, x, create_graph=True)[0].sum(), x, retain_graph=True)
    output.backward()
    return calls


@alike
def random_numbers_that_are_not_kept(again: Again) -> Values:
    (x,), given = leaves(1), torch.Generator().manual_seed(3)

    def function(x: Tensor, generator: Any) -> Tensor:
        return (x * torch.rand(6, generator=generator)).exp()

    for generator in (None, given):
        again(function, x, generator, preserve_rng_state=False).sum().backward()
    again(function, x, given).sum().backward()  # only the process's generator is brought back
    return gradients(x)


@contextmanager
def telling(log: list[str], what: str) -> Iterator[None]:
    log.append(f"{what} begins")
    try:
        yield
    finally:
        log.append(f"{what} ends")


@alike
def contexts_of_the_user(again: Again) -> Values:
    (x,), log = leaves(1), []

    def function(x: Tensor) -> Tensor:
        log.append("function")
        return waves(x)

    def contexts() -> Any:
        return telling(log, "forward"), telling(log, "recomputation")

    again(function, x, context_fn=contexts).sum().backward()
    log.append("no gradients")
    with torch.no_grad():
        again(function, x, context_fn=contexts)
    return [*log, *gradients(x)]


class Operators(TorchDispatchMode):
    """Which matrices are multiplied while it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@alike
def selective_policies(again: Again) -> Values:
    """Operators that are kept do not run again; others do."""
    selective = torch.utils.checkpoint.create_selective_checkpoint_contexts
    policy = torch.utils.checkpoint.CheckpointPolicy
    mm = torch.ops.aten.mm.default
    kinds = [[mm], [], [torch.ops.aten.sin.default, mm]]
    kinds += [lambda ctx, op, *_, it=it, **__: it for it in policy]
    seen = []
    for kind in kinds:
        x, w = leaves(2, 6, 6)
        output = again(
            lambda x, w: torch.sigmoid(((x @ w) @ w).sin() @ x) * w,
            x,
            w,
            context_fn=partial(selective, kind),
        )
        with Operators() as operators:
            output.sum().backward()
        seen += [operators.seen, *gradients(x, w)]
    return seen


@alike
def no_determinism_check(again: Again) -> Values:
    """Shapes differ and nobody looks."""
    (x,), calls = leaves(1), []

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        return (x * (2 if len(calls) == 1 else torch.full((6,), 2.0))).exp()

    again(function, x, determinism_check="none").sum().backward()
    return gradients(x)


@alike
def groups_of_backwards(again: Again) -> Values:
    if TORCH < (2, 15):
        return []
    (x,), calls = leaves(1), []

    def function(x: Tensor) -> Any:
        calls.append(len(calls))
        return x.exp(), x.sin()

    one, other = again(function, x, early_stop=False)
    with torch.utils.checkpoint.GraphExecGroup():
        one.sum().backward()
        other.sum().backward()
    return [*calls, *gradients(x)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.__name__)
def test_alike(program: Program) -> None:
    assert_same_bits(run(program, ours), run(program, torchs))


def test_the_decorator() -> None:
    """On every torch; that of 2.15 has it, too."""
    (x,) = leaves(1)
    decorate = trireme.checkpoint(preserve_rng_state=False)

    class Layer:
        @decorate
        def method(self, x: Tensor) -> Tensor:
            """Its name and text stay."""
            return waves(x)

    assert (Layer.method.__name__, Layer.method.__doc__) == ("method", "Its name and text stay.")
    expected = grad(waves(x).sum(), x)
    assert_same_bits(grad(Layer().method(x).sum(), x), expected)
    assert_same_bits(grad(decorate(waves)(x, w=x).sum(), x), expected)


def test_words_of_torch() -> None:
    """What stands beside the function there stands beside it here."""
    for name in (
        *("CheckpointError", "CheckpointPolicy", "create_selective_checkpoint_contexts"),
        *("noop_context_fn", "set_checkpoint_early_stop", "set_checkpoint_debug_enabled"),
    ):
        assert getattr(trireme, name) is getattr(torch.utils.checkpoint, name)


def test_an_except_clause_of_the_user_does_not_swallow_the_early_stop() -> None:
    """Torch's stop is an Exception, and this function would end as if an operator had failed."""

    def function(x: Tensor) -> Tensor:
        try:
            return x.sin().exp()
        except Exception:
            raise AssertionError("no operator has failed") from None

    (x,) = leaves(1)
    assert_same_bits(grad(ours(function, x).sum(), x), grad(function(x).sum(), x))


def test_threads() -> None:
    """They checkpoint at once, and share a graph."""
    model, (x,) = net().eval(), leaves(1)
    expected = grad(model(x).sum(), [x, *model.parameters()])
    shared, found = ours(model, x).sum(), []

    def work() -> None:
        for _ in range(20):
            for output in (ours(lambda x: ours(model, x), x).sum(), shared):
                found.append(grad(output, [x, *model.parameters()], retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 20 * 2
    for one in found:
        assert_same_bits(one, expected)


def test_nothing_stays_behind() -> None:
    """Intermediate results die with the call, inputs and what was recomputed with the graph."""
    (x,), seen = leaves(1), []

    def function(x: Tensor) -> Tensor:
        hidden = x.exp()
        seen.append(weakref.ref(hidden))
        return hidden.sin().exp()

    gc.collect()
    gc.disable()
    try:
        given = x * 1
        seen.append(weakref.ref(given))
        output = ours(function, given).sum()
        del given
        assert seen[1]() is None and seen[0]() is not None
        output.backward(retain_graph=True)
        output.backward()
        assert len(seen) == 4 and [it() for it in seen] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("again", [ours, torchs], ids=lambda it: it.__name__)
def test_compiled(again: Again) -> None:
    """The compiler sees torch's function, whichever is called."""
    model, (x,) = net().eval(), leaves(1)
    compiled = torch.compile(lambda x: again(model, x).sin(), backend="aot_eager")
    expected = grad(model(x).sin().sum(), [x, *model.parameters()])
    torch.testing.assert_close(grad(compiled(x).sum(), [x, *model.parameters()]), expected)


def test_hooks_that_are_always_called_see_the_early_stop() -> None:
    """Modules call them for exceptions, as torch's FSDP2 needs it for a list of modules."""
    model, seen = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), []
    model[1].register_forward_hook(lambda *_: seen.append("called"), always_call=True)
    ours(model, leaves(1)[0]).sum().backward()
    assert seen == ["called"] * 2
