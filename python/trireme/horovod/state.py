"""Parameters and states of optimizers that all ranks take from one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from trireme.horovod.errors import refuse
from trireme.horovod.functions import (
    broadcast_async,
    broadcast_async_,
    check_tensor,
    synchronize,
)
from trireme.horovod.objects import broadcast_value
from trireme.horovod.process_sets import ProcessSet, global_process_set
from trireme.horovod.run import engine


def broadcast_parameters(
    params: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Writes the root's values into the tensors of all ranks.

    Args:
        params: a dict of names and tensors, such as ``model.state_dict()``, or a list of pairs of
            these, or of tensors without a name.
        root_rank: the number of the root among all ranks.

    Raises:
        ValueError: ``params`` is something else, or has a name twice.
        HorovodInternalError: names, shapes or dtypes differ, or a rank is gone.
    """
    handles = [
        broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in _named(params)
    ]
    _wait_for_all(handles)


def _named(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, dict):
        pairs: list[tuple[Any, Any]] = list(params.items())
    elif isinstance(params, list):
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        got = f"got {type(params).__name__} as params, expected a dict or a list of pairs"
        refuse(got, "Pass model.state_dict(), or list(model.named_parameters()).")
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str | None):
            got = f"got {pair!r} in params, expected a pair of a name and a tensor"
            refuse(got, "Pass model.state_dict(), or list(model.named_parameters()).")
        check_tensor(pair[1])
    names = Counter(name for name, _ in pairs if name is not None)
    for name, count in names.items():
        if count > 1:
            refuse(f"got the name '{name}' twice in params", "Give each tensor its own name.")
    if all(name is not None for name, _ in pairs):
        pairs.sort(key=lambda pair: str(pair[0]))
    return pairs


def _wait_for_all(handles: list[int]) -> list[Any]:
    """Returns what operations return, or raises the first error once none is in flight."""
    results: list[Any] = []
    errors: list[Exception] = []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the root's state and options of an optimizer, in their own types.

    If the root has made no step yet, its state is made first: momenta are zeros, counts of steps
    are 0, no parameter moves; and a parameter without a gradient has one of zeros afterwards.

    Args:
        optimizer: a plain optimizer, or a DistributedOptimizer; of one class, over as many
            parameters, on all ranks.
        root_rank: the number of the root among all ranks.
        model: names the parameters in errors and in the timeline; without it they are numbered.

    Raises:
        ValueError: it is an LBFGS, whose state is not kept by parameter.
        TypeError: on all ranks, if the state has what hvd.broadcast_object() does not send.
        HorovodInternalError: optimizers differ in class or parameters, or a rank is gone.
    """
    _check_optimizer(optimizer)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not any(one in optimizer.state for one in parameters):
        if engine().rank == root_rank:
            _make_state(optimizer)
        for one in _trained(optimizer):
            one.grad = _zero_gradient(optimizer, one) if one.grad is None else one.grad
    counts = [len(group["params"]) for group in optimizer.param_groups]
    terms = [
        ("class of optimizer", _wrapped_class(optimizer).__name__),
        ("number of parameters in each group", str(counts)),
    ]
    described = _describe(optimizer) if engine().rank == root_rank else None
    kind = "broadcast optimizer state"
    described = broadcast_value(kind, described, root_rank, None, process_set, terms)
    names = _names_of(parameters, model)
    if engine().rank == root_rank:
        _send(optimizer, described, names, root_rank, process_set)
    else:
        _receive(optimizer, described, names, root_rank, process_set)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        got = f"got {type(optimizer).__name__} as optimizer, expected a torch.optim.Optimizer"
        refuse(got, "Pass an optimizer.", kind=TypeError)
    if isinstance(optimizer, LBFGS):
        got = "got LBFGS, expected an optimizer that keeps its state by parameter"
        refuse(got, "Let each rank make its own state.")


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    groups = optimizer.param_groups
    return [one for group in groups for one in group["params"] if one.requires_grad]


def _zero_gradient(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros_like(parameter, requires_grad=False)
    return zeros.to_sparse() if isinstance(optimizer, SparseAdam) else zeros


# --- a state where there is none -----------------------------------------------------------------

_AT_THE_BEGINNING = {"step": 0, "mu_product": 1}  # what NAdam multiplies with in each step


def _make_state(optimizer: Optimizer) -> None:
    """Makes the state that a step makes, and leaves parameters and gradients as they were."""
    with _zero_gradients(optimizer), _options(optimizer, weight_decay=0):
        _step_of_wrapped(optimizer)()
    for state in optimizer.state.values():
        for key, value in _AT_THE_BEGINNING.items():
            if isinstance(state.get(key), torch.Tensor):
                state[key].fill_(value)
            elif key in state:
                state[key] = type(state[key])(value)


@contextmanager
def _zero_gradients(optimizer: Optimizer) -> Iterator[None]:
    kept = [(one, one.detach().clone(), one.grad) for one in _trained(optimizer)]
    for one, _, _ in kept:
        one.grad = _zero_gradient(optimizer, one)
    try:
        yield
    finally:
        with torch.no_grad():
            for one, values, gradient in kept:
                one.copy_(values)
                one.grad = gradient


@contextmanager
def _options(optimizer: Optimizer, **options: Any) -> Iterator[None]:
    """Sets options of all groups that have them, and puts them back."""
    kept = [
        {key: group[key] for key in options if key in group} for group in optimizer.param_groups
    ]
    for group, own in zip(optimizer.param_groups, kept, strict=True):
        group.update({key: options[key] for key in own})
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            group.update(own)


def _wrapped_class(optimizer: Optimizer) -> type[Optimizer]:
    """Returns the class that a DistributedOptimizer wraps; the class of any other optimizer."""
    classes = type(optimizer).__mro__
    ours = [i for i, one in enumerate(classes) if one.__module__.startswith("trireme.horovod")]
    return classes[ours[-1] + 1] if ours else type(optimizer)


def _step_of_wrapped(optimizer: Optimizer) -> Callable[[], Any]:
    """A scheduler counts calls of ``optimizer.step``, which is not called."""
    return lambda: _wrapped_class(optimizer).step(optimizer)


# --- a state on its way --------------------------------------------------------------------------


def _is_sent_alone(value: Any) -> bool:
    is_plain = type(value) in (torch.Tensor, nn.Parameter)
    return is_plain and value.layout == torch.strided and not value.is_quantized


def _places(optimizer: Optimizer) -> dict[torch.Tensor, int]:
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    return {one: place for place, one in enumerate(parameters)}


def _describe(optimizer: Optimizer) -> dict[str, Any]:
    """Returns options and state without tensors of the state, and what these look like."""
    places = _places(optimizer)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state: dict[Any, Any] = {}
    tensors: list[tuple[int, str, str, list[int], bool]] = []
    for parameter, own in optimizer.state.items():
        place = places.get(parameter, -1) if isinstance(parameter, torch.Tensor) else -1
        if place < 0:
            continue  # of a parameter that was taken out of its group
        state[place] = {key: None if _is_sent_alone(one) else one for key, one in own.items()}
        tensors += [
            (place, key, str(one.dtype), list(one.shape), one.is_cpu)
            for key, one in own.items()
            if _is_sent_alone(one)
        ]
    return {"groups": groups, "state": state, "tensors": tensors}


def _names_of(parameters: list[torch.Tensor], model: nn.Module | None) -> list[str]:
    found: dict[torch.Tensor, str] = {}
    if model is not None:
        found = {one: name for name, one in model.named_parameters()}
    return [found.get(one, str(place)) for place, one in enumerate(parameters)]


def _send(
    optimizer: Optimizer,
    described: dict[str, Any],
    names: list[str],
    root_rank: int,
    process_set: ProcessSet,
) -> None:
    parameters = list(_places(optimizer))
    _wait_for_all(
        [
            broadcast_async(
                optimizer.state[parameters[place]][key],
                root_rank,
                f"optimizer state {names[place]}.{key}",
                process_set,
            )
            for place, key, *_ in described["tensors"]
        ]
    )


def _receive(
    optimizer: Optimizer,
    described: dict[str, Any],
    names: list[str],
    root_rank: int,
    process_set: ProcessSet,
) -> None:
    parameters = list(_places(optimizer))
    handles = []
    for place, key, dtype, shape, is_cpu in described["tensors"]:
        own = optimizer.state.get(parameters[place], {}).get(key)
        device = torch.device("cpu") if is_cpu else parameters[place].device
        like = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
        if not _is_like(own, like, device):
            own = torch.empty_like(like, device=device)
        described["state"][place][key] = own
        name = f"optimizer state {names[place]}.{key}"
        handles.append(broadcast_async_(own, root_rank, name, process_set))
    _wait_for_all(handles)
    optimizer.state.clear()
    for place, state in described["state"].items():
        optimizer.state[parameters[place]] = state
    for group, options in zip(optimizer.param_groups, described["groups"], strict=True):
        _take_options(group, options)


def _is_like(own: Any, like: torch.Tensor, device: torch.device) -> bool:
    return (
        _is_sent_alone(own)
        and own.dtype == like.dtype
        and own.shape == like.shape
        and own.device == device
    )


def _take_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Keeps tensors among the options, such as a learning rate, where they are."""
    for key in group.keys() - options.keys() - {"params"}:
        del group[key]
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                value = own.copy_(value) if own.shape == value.shape else value.to(own.device)
        group[key] = value
