"""The backward of a stage under torch's names: in one piece, or in two halves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from trireme import _C
from trireme._pipeline import refuse

_Root = Tensor | GradientEdge


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Iterable[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> tuple[Tensor | None, ...]:
    """Adds gradients of parameters to their ``.grad``; returns those of the inputs.

    Args:
        stage_output: What the stage returned: tensors, gradient edges in their place, in tuples,
            lists and dicts; or its loss.
        output_grads: Gradients, in values of the same form; None for a loss, and where an output
            has none.
        input_values: What the stage was called with. Leaves whose ``.grad`` is taken away.
        outputs_with_grads_idxs: Which outputs and gradients count. None for all.

    Returns:
        One per input; None for what is no tensor, or has no gradient.

    Raises:
        TypeError, ValueError: gradients that do not have the form of the outputs.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    roots: list[_Root] = []
    gradients: list[Tensor | None] = []
    _collect(stage_output, output_grads, roots, gradients, stage_output)
    if roots:
        torch.autograd.backward(roots, grad_tensors=gradients)  # type: ignore[arg-type]
    found: list[Tensor | None] = []
    for value in input_values:
        found.append(value.grad if isinstance(value, Tensor) and value.is_leaf else None)
        if found[-1] is not None:
            value.grad = None
    return tuple(found)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[_Root | None],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Computes the gradients of a stage's inputs, and leaves those of its weights for later.

    Args:
        stage_outputs_or_loss: What the stage returned, or its loss alone.
        output_grads: One per output; None for a loss.
        input_values: What the stage was called with.
        weights: Whose gradients :func:`stage_backward_weight` may be asked for.

    Returns:
        The gradients of the inputs, one each, None where there is none; they are added to
        ``.grad`` of the inputs, too. And what :func:`stage_backward_weight` takes.
    """
    roots: list[_Root] = []
    gradients: list[Tensor] = []
    for number, output in enumerate(stage_outputs_or_loss):
        given = None if output_grads is None else output_grads[number]
        if isinstance(output, Tensor) and output.requires_grad:
            if output_grads is not None and given is None:
                continue
            roots.append(output)
            gradients.append(torch.ones_like(output) if given is None else given)
        elif isinstance(output, GradientEdge):
            if given is None:
                refuse("got a GradientEdge without a gradient", "Pass output_grads.",
                       kind=TypeError)  # fmt: skip
            roots.append(output)
            gradients.append(given)
    inputs = [value if isinstance(value, Tensor) else None for value in input_values]
    backward = _C.SplitBackward(roots, gradients, inputs)
    found = tuple(backward.input_half())
    for value, gradient in zip(inputs, found, strict=True):
        if value is not None and gradient is not None and value.is_leaf:
            value.grad = gradient if value.grad is None else value.grad.add_(gradient)
    return found, [{"params": list(weights), "backward": backward}]


def stage_backward_weight(
    weights: Iterable[Tensor], param_groups: Sequence[dict[str, Any]], retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Adds the gradients of weights to their ``.grad``, and returns these.

    They pass hooks and what else hangs on the way to ``.grad``. Ends the graph.

    Args:
        weights: Those whose gradients are wanted.
        param_groups: What :func:`stage_backward_input` returned.
        retain_graph: False. True is refused: the first half has released parts of the graph.
    """
    if retain_graph:
        got = "got retain_graph=True for the second half of a backward, which ends the graph"
        refuse(got, "Leave it out.", kind=NotImplementedError)
    wanted = list(weights)
    for group in param_groups:
        backward = group.pop("backward", None)
        if backward is None:
            got = "got a group of parameters without its backward, expected it once"
            refuse(got, "Pass what stage_backward_input() returned, once.")
        backward.weight_half(wanted)
    return tuple(weight.grad for weight in wanted)


def _collect(
    output: Any, gradient: Any, roots: list[_Root], gradients: list[Tensor | None], whole: Any
) -> None:
    """Lists outputs that have a graph, and their gradients; None is 1 for a loss."""
    if isinstance(output, GradientEdge) or (isinstance(output, Tensor) and output.requires_grad):
        needs = isinstance(output, GradientEdge)
        if not isinstance(gradient, Tensor if needs else Tensor | None):
            got = f"got a {type(gradient).__name__} as the gradient of an output"
            refuse(f"{got}, expected a tensor", "Pass one for each output.", kind=TypeError)
        if gradient is not None or output is whole or output.numel() == 1:
            roots.append(output)
            gradients.append(gradient)
        return
    if isinstance(output, Tensor) or gradient is None:
        return
    if isinstance(output, dict):
        if not isinstance(gradient, dict) or gradient.keys() != output.keys():
            refuse("got gradients with other keys than the outputs", "Pass the same keys.")
        for key, item in output.items():
            _collect(item, gradient[key], roots, gradients, whole)
    elif isinstance(output, tuple | list):
        if not isinstance(gradient, tuple | list) or len(gradient) != len(output):
            refuse("got gradients of another form than the outputs", "Pass one for each output.")
        for item, its in zip(output, gradient, strict=True):
            _collect(item, its, roots, gradients, whole)
