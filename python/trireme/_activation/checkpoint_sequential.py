"""checkpoint_sequential(): a sequence of layers in segments, or as a plan says."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trireme import _C
from trireme._activation import AREA, refuse
from trireme._activation.activation_costs import measure_layers, modules_in
from trireme._activation.checkpoint import checkpoint
from trireme._activation.checkpoint_plan import checkpoint_plan
from trireme._core.find_tensors import find_tensors

Layers = Sequence[Callable[..., Any]]

_OPTIONS = {
    name
    for name, parameter in inspect.signature(checkpoint).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def checkpoint_sequential(
    functions: nn.Sequential | Iterable[Callable[..., Any]],
    segments: int | str,
    input: Any,
    *,
    budget_bytes: int | None = None,
    use_reentrant: bool | None = False,
    **options: Any,
) -> Any:
    """Calls layers one after the other and checkpoints some of them.

    Torch's equivalent is ``torch.utils.checkpoint.checkpoint_sequential(use_reentrant=False)``; a
    number cuts as it does there.

    Args:
        functions: A ``torch.nn.Sequential`` or a list of modules or functions; each takes what the
            one before it has returned.
        segments: A number: so many runs of equal length, all but the last of them checkpointed
            (it has the layers that are left over). ``"sqrt"``: the root of the number of layers,
            rounded up, which holds least where all are alike. ``"auto"``: layers are recomputed
            each by itself, as :func:`checkpoint_plan` says for ``budget_bytes``.
        input: What the first one takes.
        budget_bytes: With ``"auto"``: what these layers may hold at any moment. Their costs are
            measured by one forward more (:func:`measure_activations`) when they are first called
            with inputs of such shapes and dtypes, in this mode of training and autocast; layers
            that are frozen or thawed are measured again, as are layers without any module in each
            call. Ranks that have equal inputs choose alike.
        use_reentrant: Here for torch's sake. ``True`` is refused.
        options: Those of :func:`checkpoint`.

    Raises:
        ValueError: Fewer than 1 or more segments than layers, another word, ``"auto"`` without a
            budget or a budget without it, a budget that no choice fits: the text names the least;
            an option that :func:`checkpoint` does not have.
    """
    options["use_reentrant"] = use_reentrant
    if unknown := sorted(options.keys() - _OPTIONS):
        refuse(f"got {', '.join(unknown)}, expected options of checkpoint()", "Leave them out.")
    if budget_bytes is not None and segments != "auto":
        got = f'got budget_bytes and segments={segments!r}, expected a budget with "auto" only'
        refuse(got, "Leave one of them out.")
    layers = list(functions)
    if segments == "auto":
        if budget_bytes is None:
            got = 'got segments="auto" without budget_bytes, expected how much may be held'
            refuse(got, "Pass budget_bytes=, for example half of what training takes without it.")
        recompute = _chosen(functions, layers, input, budget_bytes)
        for layer, is_recomputed in zip(layers, recompute, strict=True):
            input = checkpoint(layer, input, **options) if is_recomputed else layer(input)
        return input
    bounds = _C.segment_bounds(len(layers), _number(segments, len(layers)))
    for begin, end in itertools.pairwise(bounds):
        run = _run_of(layers[begin:end])
        input = run(input) if end == len(layers) else checkpoint(run, input, **options)
    return input


def _number(segments: int | str, layers: int) -> int:
    if segments == "sqrt":
        return int(_C.square_root_segments(layers))
    if isinstance(segments, str):
        got = f'got segments={segments!r}, expected a number, "sqrt" or "auto"'
        refuse(got, "Pass one of them.")
    AREA.expect("segments", segments, int, "int or str", next_step="Pass a whole number.")
    return int(segments)


def _run_of(layers: Layers) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for layer in layers:
            value = layer(value)
        return value

    return run


# Each module of a sequence has its choices, by all that a choice depends on.
_choices: WeakKeyDictionary[nn.Module, dict[object, tuple[bool, ...]]] = WeakKeyDictionary()


def _chosen(owner: object, layers: Layers, value: Any, budget_bytes: int) -> tuple[bool, ...]:
    if not torch.is_grad_enabled():
        return (False,) * len(layers)
    of_layers = [modules_in(layer) for layer in layers]
    modules = [inner for found in of_layers for module in found for inner in module.modules()]
    if isinstance(owner, nn.Module):
        modules.append(owner)
    tensors, _ = find_tensors(value)
    kinds = sorted({tensor.device.type for tensor in tensors})
    key = (
        budget_bytes,
        # A function that is made anew for each forward is known by the modules that it calls.
        tuple(
            tuple(map(id, found)) or id(layer)
            for layer, found in zip(layers, of_layers, strict=True)
        ),
        tuple(
            (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors
        ),
        tuple(module.training for module in modules),
        tuple(
            parameter.requires_grad
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None
        ),
        tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ),
    )
    known = _choices.setdefault(modules[-1], {}) if modules else {}
    if key not in known:
        plan = checkpoint_plan(measure_layers(layers, (value,)), budget_bytes)
        known[key] = plan.recompute
    return known[key]
