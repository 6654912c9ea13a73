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
    for tensor in found:
        assert_same_bits(tensor, expected)


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


def test_lists_and_dicts_are_what_the_first_call_got() -> None:
    """Also those without tensors, and those that come twice."""

    def grow(first: list[Any], second: list[Any], notes: list[Any], memo: dict[str, Any]) -> Tensor:
        first.append(first[0].sin())
        notes.append(first[-1])
        memo["more"] = second[-1].exp()
        return memo["more"] * sum(notes) + len(memo)

    (x,) = leaves(1)
    both = [x]
    expected = grad(grow(both, both, [], {}).sum(), x)
    both = [x]
    assert_same_bits(grad(ours(grow, both, both, [], memo={}).sum(), x), expected)
    around: list[Any] = [x]
    around.append(around)
    assert_same_bits(grad(ours(lambda it: it[1][0].exp(), around).sum(), x), grad(x.exp().sum(), x))


def test_tensors_of_inference_mode_are_kept_as_they_are() -> None:
    with torch.inference_mode():
        mask = torch.ones(6)
    (x,) = leaves(1)
    found = grad(ours(lambda x, mask: (x + mask).exp(), x, mask=mask).sum(), x)
    assert_same_bits(found, grad((x + 1).exp().sum(), x))


@pytest.mark.parametrize("again", [False, True])
def test_hooks_that_an_exception_has_left_behind(again: bool) -> None:
    """A module's hooks may push and pop some; the latter does not run where forward raises."""
    calls, (x,) = [], leaves(1)

    def function(x: Tensor) -> Tensor:
        torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it).__enter__()
        calls.append(1)
        if len(calls) > again:
            raise ValueError("spilled the coffee")
        torch._C._autograd._pop_saved_tensors_default_hooks()
        return x.exp()

    with pytest.raises(ValueError, match="spilled the coffee"):
        ours(function, x).sum().backward()
    assert_same_bits(grad(ours(torch.exp, x).sum(), x), grad(x.exp().sum(), x))


def test_a_decorator_listens_to_contexts() -> None:
    ends: list[int] = []

    @trireme.checkpoint()
    def function(x: Tensor) -> Tensor:
        x = x.exp()
        ends.append(1)
        return x

    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        function(leaves(1)[0]).sum().backward()
    assert len(ends) == 2


def test_a_decorator_under_the_compiler() -> None:
    model, (x,) = net().eval(), leaves(1)
    function = torch.compile(trireme.checkpoint()(lambda x: model(x).sin()), backend="aot_eager")
    expected = grad(model(x).sin().sum(), [x, *model.parameters()])
    torch.testing.assert_close(grad(function(x).sum(), [x, *model.parameters()]), expected)


def test_backwards_over_parts_of_a_graph_hold_no_more_and_more() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.exp()
        seen.append(weakref.ref(hidden))
        return hidden.sin(), hidden.cos()

    (x,) = leaves(1)
    one, _other = ours(function, x)
    for _ in range(40):
        grad(one.sum(), x, retain_graph=True)
    assert sum(it() is not None for it in seen) <= 20
