"""What goes wrong in a checkpoint: torch's exceptions in torch's cases, and some that it misses."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import trireme
from torch import Tensor
from torch.autograd import grad

from activation.programs import Again, leaves, ours, torchs, waves

Case = Callable[[Again], Any]
CASES: dict[str, tuple[Case, str]] = {}


def raising(pattern: str) -> Callable[[Case], Case]:
    """The decorated function raises by ours what it raises by torch's; our text has ``pattern``."""

    def decorate(case: Case) -> Case:
        CASES[case.__name__] = (case, pattern)
        return case

    return decorate


def error_of(case: Case, again: Again) -> BaseException:
    """Afterwards nothing is left on the stack of hooks, and checkpoints work."""
    torch.manual_seed(7)
    with pytest.raises(BaseException) as caught:
        case(again)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    (x,) = leaves(1)
    assert torch.equal(*grad(again(waves, x).sum(), x), *grad(waves(x).sum(), x))
    return caught.value


def second(first: Callable[[Tensor], Any], then: Callable[[Tensor], Any]) -> Any:
    """A function that does something else the second time."""
    calls: list[int] = []

    def function(x: Tensor) -> Any:
        calls.append(0)
        return (first if len(calls) == 1 else then)(x)

    return function


def throw(error: BaseException) -> Any:
    raise error


@raising(r"^\[checkpoint\] .* saved 1 tensors where the forward had saved 2")
def fewer_tensors(again: Again) -> None:
    again(second(lambda x: x.exp().sin(), torch.sin), *leaves(1)).sum().backward()


@raising(r"^\[checkpoint\] .* saved more than the 1 tensors of the forward")
def more_tensors(again: Again) -> None:
    function = second(torch.exp, lambda x: x.exp().sin())
    again(function, *leaves(1), early_stop=False).sum().backward()


@raising(r"tensor 0 is .*\[2, 6\].* and was .*\[4, 6\]")
def another_shape(again: Again) -> None:
    again(second(torch.exp, lambda x: x[:2].exp()), *leaves(1)).sum().backward()


@raising(r"tensor 0 is .*Double.* and was .*Float")
def another_dtype(again: Again) -> None:
    again(second(torch.exp, lambda x: x.double().exp()), *leaves(1)).sum().backward()


@raising("aten.*(sin|cos)")
def operators_are_listed(again: Again) -> None:
    """Those of both runs; torch lists them in another form."""
    function = second(lambda x: x.exp().sin(), lambda x: x.exp().double().cos())
    again(function, *leaves(1), debug=True).sum().backward()


@raising("determinism_check.*exact")
def an_unknown_check(again: Again) -> None:
    again(waves, *leaves(1), determinism_check="exact")


@raising("debug.*context_fn")
def debug_with_contexts(again: Again) -> None:
    again(waves, *leaves(1), debug=True, context_fn=lambda: trireme.noop_context_fn())


@raising("modified by an inplace operation")
def an_input_written_after_the_forward(again: Again) -> None:
    (x,) = leaves(1)
    given = x * 1
    output = again(waves, given)
    given.add_(1)
    output.sum().backward()


@raising("modified by an inplace operation")
def an_input_that_the_function_writes(again: Again) -> None:
    (x,) = leaves(1)
    again(lambda it: it.mul_(2).exp(), x * 1).sum().backward()


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * ctx.saved_tensors[0]


@raising("asked for a second time in one backward")
def saved_tensors_read_twice(again: Again) -> None:
    again(ReadsTwice.apply, *leaves(1)).sum().backward()


@raising("a second time")
def a_second_backward(again: Again) -> None:
    loss = again(waves, *leaves(1)).sum()
    loss.backward()
    loss.backward()


@raising("^mine$")
def an_exception_in_the_forward(again: Again) -> None:
    again(lambda x: throw(LookupError("mine")), *leaves(1))


@raising("^mine$")
def an_exception_in_an_inner_forward(again: Again) -> None:
    again(lambda x: again(lambda x: throw(OSError("mine")), x.exp()), *leaves(1))


@raising("^mine$")
def an_exception_in_the_recomputation(again: Again) -> None:
    function = second(waves, lambda x: throw(LookupError("mine")))
    again(lambda x: again(function, x.exp()).sin(), *leaves(1)).sum().backward()


@raising("")
def ctrl_c_in_the_recomputation(again: Again) -> None:
    again(second(waves, lambda x: throw(KeyboardInterrupt())), *leaves(1)).sum().backward()


@raising("mutated")
def a_kept_tensor_that_is_written(again: Again) -> None:
    """By a selective policy."""
    selective = torch.utils.checkpoint.create_selective_checkpoint_contexts
    kept = []

    def function(x: Tensor) -> Tensor:
        kept.append(x.sin())
        return kept[-1].exp()

    contexts = partial(selective, [torch.ops.aten.sin.default])
    output = again(function, *leaves(1), context_fn=contexts)
    with torch.no_grad():
        kept[0].add_(1)
    output.sum().backward()


@raising("")
def under_a_transform(again: Again) -> None:
    """Torch's transforms have no hooks for saved tensors."""
    torch.func.grad(lambda x: again(waves, x).sum())(torch.randn(3))


@pytest.mark.parametrize("name", CASES)
def test_torchs_exceptions(name: str) -> None:
    case, pattern = CASES[name]
    mine, theirs = error_of(case, ours), error_of(case, torchs)
    assert type(mine) is type(theirs)
    assert re.search(pattern, str(mine), re.DOTALL), str(mine)


def test_the_next_backward_works() -> None:
    """After an exception in a recomputation, over the same graph, which was to be kept."""
    (x,), calls = leaves(1), []

    def function(x: Tensor) -> Tensor:
        calls.append(0)
        return throw(LookupError("mine")) if len(calls) == 2 else waves(x)

    loss = ours(function, x).sum()
    with pytest.raises(LookupError, match="mine"):
        loss.backward(retain_graph=True)
    assert torch.equal(*grad(loss, x), *grad(waves(x).sum(), x))


@pytest.mark.parametrize("where", ["keyword", "list", "dict in a tuple", "keyword list"])
def test_inputs_anywhere_are_watched(where: str) -> None:
    """Torch watches positional tensors only, and would compute with what was written."""
    (x,) = leaves(1)
    given = x * 1
    inputs: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
        "keyword": (lambda *, a: waves(a), (), {"a": given}),
        "list": (lambda a: waves(a[0]), ([given],), {}),
        "dict in a tuple": (lambda a: waves(a[1]["b"]), ((1, {"b": given}),), {}),
        "keyword list": (lambda *, a: waves(a[0]), (), {"a": [given]}),
    }
    function, positional, named = inputs[where]
    output = ours(function, *positional, **named)
    assert torch.equal(*grad(output.sum(), x, retain_graph=True), *grad(waves(x * 1).sum(), x))
    given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("options", "kind", "parts"),
    [
        ({"use_reentrant": True}, ValueError, ("use_reentrant",)),
        ({"determinism_check": 3}, ValueError, ("determinism_check",)),
    ],
)
def test_refusals_have_the_house_form(options: Any, kind: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(kind, match=r"^\[checkpoint\] got .*, expected .*\. [A-Z].*\.$") as caught:
        ours(waves, *leaves(1), **options)
    assert all(part in str(caught.value) for part in parts)


def test_a_difference_that_the_function_catches() -> None:
    calls: list[int] = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        try:
            more = x.cos() if len(calls) > 1 else x
            return more.sin().exp()
        except Exception:
            return x

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(trireme.CheckpointError, match="saved 3 tensors where"):
        trireme.checkpoint(function, x, early_stop=False).sum().backward()
