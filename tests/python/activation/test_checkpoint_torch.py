"""With trireme.checkpoint programs do what they do without it, as with torch's: bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from activation.programs import (
    Again,
    Program,
    Values,
    assert_same_bits,
    gradients,
    leaves,
    net,
    ours,
    plain,
    run,
    torchs,
    waves,
)

PROGRAMS: list[Program] = []


def bits(program: Program) -> Program:
    PROGRAMS.append(program)
    return program


@bits
def a_module_with_dropout(again: Again) -> Values:
    model, (x,) = net(), leaves(1)
    loss = again(model, again(model, x)).square().sum()
    loss.backward()
    return [loss, *gradients(x, model)]


@bits
def inputs_and_outputs_of_all_kinds(again: Again) -> Values:
    x, y, z, w = leaves(4)

    def function(a: Tensor, pair: Any, word: str, *, named: Tensor, none: None, by: float) -> Any:
        assert (word, none, by) == ("word", None, 0.5)
        out = a * pair[0].exp() + pair[1]["deep"].sin() * by
        return {"sum": out, "both": (out * named, 3)}, None

    out, nothing = again(function, x, (y, {"deep": z}), "word", named=w, none=None, by=0.5)
    assert nothing is None and out["both"][1] == 3
    (out["sum"] * out["both"][0]).sum().backward()
    return [out, *gradients(x, y, z, w)]


@bits
def functions_of_all_kinds(again: Again) -> Values:
    class Layer:
        def __init__(self) -> None:
            self.weight = torch.randn(6, 6, requires_grad=True)

        def __call__(self, x: Tensor) -> Tensor:
            return (x @ self.weight).tanh()

        def method(self, x: Tensor) -> Tensor:
            return self(x).exp()

    layer, (x,) = Layer(), leaves(1)
    for function in (layer, layer.method, partial(waves, w=x), torch.exp, lambda x: x * x):
        again(function, x).sum().backward()
    return gradients(x, layer.weight)


@bits
def what_a_function_leaves_elsewhere(again: Again) -> Values:
    """It returns nothing; another input needs no gradient."""
    (x,), kept = leaves(1), []
    assert again(lambda a, b: kept.append(waves(a, b)), x, x.detach() * 2) is None
    kept[0].sum().backward()
    return gradients(x)


@bits
def several_backwards(again: Again) -> Values:
    (x,), model = leaves(1), net()
    loss = again(model, x).sum()
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
    return gradients(x, model)


@bits
def backwards_of_parts(again: Again) -> Values:
    """Of one output after the other, for some inputs only, and in one function for both."""
    x, w = leaves(2)
    one, other = again(lambda x, w: (waves(x, w), waves(w).exp()), x, w)
    found = [*grad(one.sum(), [x], retain_graph=True)]
    other.sum().backward(inputs=[w], retain_graph=True)
    (one * other).sum().backward()
    return [*found, *gradients(x, w)]


@bits
def second_derivatives(again: Again) -> Values:
    x, w = leaves(2)
    found = []
    for output in (again(waves, x, w), again(lambda x: again(waves, x, w).sin(), x)):
        first = grad(output.sum(), [x, w], create_graph=True)
        found += [*first, *grad(sum(it.square().sum() for it in first), [x, w])]
    return found


@bits
def a_backward_inside(again: Again) -> Values:
    (x,), found = leaves(1), []
    for early_stop in (True, False):
        for retain in (True, False):

            def function(x: Tensor, retain: bool = retain) -> Tensor:
                z = x.sin().cos()
                return x.cos() * grad(z.sum(), x, retain_graph=retain)[0] * x.exp()

            found += grad(again(function, x, early_stop=early_stop).sum(), x)
    return found


@bits
def nested_three_deep(again: Again) -> Values:
    model, (x, w) = net(), leaves(2)

    def innermost(x: Tensor) -> Tensor:
        return functional.dropout(waves(x, w), 0.2)

    def inner(x: Tensor) -> Tensor:
        return again(innermost, model(x)) + again(innermost, x).tanh()

    def outer(x: Tensor) -> Tensor:
        return again(inner, x.exp()) * again(model, x)

    loss = again(outer, x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss, *gradients(x, w, model)]


@bits
def autocast_outside_and_inside(again: Again) -> Values:
    model, (x,), found = net(), leaves(1), []

    def narrow(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def wide(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return model[0](x.float()).tanh()

    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = [again(it, x) for it in (model, narrow, wide)]
        found += outputs
        sum(it.float().sum() for it in outputs).backward()
        assert not torch.is_autocast_enabled("cpu")
    return [*found, *gradients(x, model)]


@bits
def a_weight_of_two_selective_checkpoints_under_autocast(again: Again) -> Values:
    """With autocast's cache the second forward would have no cast of the weight to keep."""
    operators = torch.ops.aten
    kept = [operators._to_copy.default, operators.mm.default, operators.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    model, (x,) = torch.nn.Linear(6, 6), leaves(1)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output = again(model, again(model, x, context_fn=contexts), context_fn=contexts)
    output.float().sum().backward()
    return [output, *gradients(x, model)]


@bits
def random_numbers(again: Again) -> Values:
    """The caller's go on as after one call, in whichever order backwards come."""
    (x,), found = leaves(1), []

    def function(x: Tensor) -> Tensor:
        noise = again(lambda x: functional.dropout(x * torch.randn(6), 0.5), x)
        return noise * torch.rand_like(x) if torch.rand(()) < 0.5 else noise.exp()

    outputs = []
    for _ in range(4):
        outputs.append(again(function, x).sum())
        found.append(torch.rand(3))
    for number in (2, 0, 3, 1):
        found += [*grad(outputs[number], x), torch.rand(3)]
    return found


@bits
def hooks_on_tensors(again: Again) -> Values:
    """One runs once per backward, though the tensor is made twice."""
    (x,), seen = leaves(1), []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return 2 * gradient

    def function(x: Tensor) -> Tensor:
        hidden = x.sin()
        hidden.register_hook(double)
        return hidden.exp() * x

    again(function, x).sum().backward()
    return [*seen, *gradients(x)]


@bits
def hooks_for_saved_tensors(again: Again) -> Values:
    """Those of a user, around the checkpoint and in it."""
    (x,), found = leaves(1), []

    def inside(x: Tensor) -> Tensor:
        hidden = x.exp()
        with saved_tensors_hooks(lambda it: it * 1, lambda it: it):
            hidden = hidden.sin()
        return hidden.exp()

    for around in (save_on_cpu(), saved_tensors_hooks(lambda it: [it], lambda it: it[0])):
        with around:
            output = again(inside, x)
        found += grad(output.sum(), x)
    return found


@bits
def parameters_frozen_and_tied(again: Again) -> Values:
    model, (x,) = net(), leaves(1)
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    loss = again(lambda x: again(model, x) @ model[3].weight, x.detach()).square().sum()
    loss.backward()
    return [loss, *gradients(model)]


@bits
def operators_in_place(again: Again) -> Values:
    def function(x: Tensor) -> Tensor:
        hidden = (x * 2).add_(1)
        hidden[:, 1:].mul_(3)
        return functional.relu(hidden.sin(), inplace=True).cumsum(0)

    (x,) = leaves(1)
    again(function, x).sum().backward()
    return gradients(x)


@bits
def views_and_other_dtypes(again: Again) -> Values:
    x, w = leaves(2, 6, 4)

    def function(x: Tensor, mask: Tensor, index: Tensor) -> Tensor:
        picked = x.t().double().index_select(1, index).masked_fill(mask, 0)
        return torch.view_as_real(torch.complex(picked, picked.exp()) * 1j).flatten()

    mask, index = torch.rand(4, 5) < 0.3, torch.tensor([0, 2, 2, 5, 1])
    again(function, (x * w)[::1], mask, index).square().sum().backward()
    return gradients(x, w)


class Cube(torch.autograd.Function):
    """Reads what it has saved once, as a function should."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, x * factor)
        return x**3 * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scaled = ctx.saved_tensors
        return 3 * gradient * x * scaled, None


@bits
def functions_of_autograd(again: Again) -> Values:
    (x,) = leaves(1)
    again(lambda x: Cube.apply(Cube.apply(x, 0.5), 2.0).sin(), x).sum().backward()
    return gradients(x)


@bits
def without_gradients(again: Again) -> Values:
    model, (x,), calls = net(), leaves(1), []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            calls.append(again(lambda x: model(x), x * 1))
            assert not calls[-1].requires_grad
    with torch.no_grad(), torch.enable_grad():  # a recomputation has gradients where this had
        output = again(lambda x: model(x), x)
    output.sum().backward()
    return [*(it.clone() for it in calls), *gradients(x, model)]


@bits
def the_device_of_a_context(again: Again) -> Values:
    """What the function makes lies there, also in the backward outside of the context."""
    with torch.device("meta"):
        x = torch.randn(4, 6, requires_grad=True)
        output = again(lambda x: (x * torch.ones(6)).exp() * torch.rand(6), x)
    output.sum().backward()
    assert x.grad is not None
    return [str(x.grad.device), tuple(x.grad.shape)]


@bits
def torchs_wrapper_of_modules(again: Again) -> Values:
    model, (x,) = checkpoint_wrapper(net(), checkpoint_fn=again), leaves(1)
    model(x).sum().backward()
    return [list(model.state_dict()), *gradients(x, model)]


@bits
def a_loop_that_stops(again: Again) -> Values:
    """How often it runs is decided by the values."""

    def function(x: Tensor) -> Tensor:
        while x.detach().square().sum() > 1:
            x = x.sin() * 0.7
        return x

    (x,) = leaves(1)
    again(function, x).sum().backward()
    return gradients(x)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.__name__)
def test_bits(program: Program) -> None:
    expected = run(program, plain)
    for again in (ours, torchs):
        assert_same_bits(run(program, again), expected, again.__name__)
