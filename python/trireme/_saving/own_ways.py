"""Modules that save or load in a way of their own: what a checkpoint does about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from trireme._C import CheckpointTensor, has_memory
from trireme._core.owners import group_of_stages, keeps_elsewhere
from trireme._saving.parts import (
    NamedTensor,
    Ranks,
    plain_name,
    resharded_model,
    tensor_to_load,
    tensor_to_save,
)

_HARMLESS = ("torch.nn.", "torch.distributed.", "trireme.")
"""Their hooks leave values and names as they are, or take off what wrappers have added."""


class TensorsElsewhere:
    """Copies of what modules of a model keep in other processes, such as ``remote.Module``. They
    count as buffers, which are the same on all ranks."""

    def __init__(self, model: nn.Module) -> None:
        plain = resharded_model(model)
        self._is_everywhere = group_of_stages(plain) is None
        self._found = [
            (name, module, module._tensors_elsewhere())
            for name, module in plain.named_modules()
            if keeps_elsewhere(module)
        ]

    def to_save(self, ranks: Ranks) -> list[CheckpointTensor]:
        return [tensor_to_save(named, ranks) for named in self._named()]

    def to_load(self, ranks: Ranks) -> list[CheckpointTensor]:
        return [tensor_to_load(named, ranks) for named in self._named()]

    def put(self) -> None:
        """Writes what has been loaded into the copies where it belongs."""
        for _, module, tensors in self._found:
            module._put_elsewhere(tensors)

    def _named(self) -> Iterator[NamedTensor]:
        for prefix, _, tensors in self._found:
            for name, tensor in tensors.items():
                full_name = f"{prefix}.{name}" if prefix else name
                yield NamedTensor(plain_name(full_name), tensor, True, self._is_everywhere)


def expect_plain_states(model: nn.Module, ranks: Ranks) -> None:
    """Refuses a module whose state dict is something else than its parameters and buffers.

    Raises:
        ValueError: there is one; the text names it, its class and the difference.
    """
    for prefix, owner in resharded_model(model).named_modules():
        if keeps_elsewhere(owner) or not (_saves_in_own_way(owner) and _is_here(owner)):
            continue
        difference = _difference_of(owner)
        if difference:
            ranks.refuse(
                f"got '{prefix}', a {type(owner).__qualname__} whose state_dict() {difference}, "
                "expected its parameters and buffers",
                "Keep what it saves in buffers, or save it as `extra`.",
            )


def _saves_in_own_way(owner: nn.Module) -> bool:
    hooks = (*owner._state_dict_hooks.values(), *owner._state_dict_pre_hooks.values())
    return not all(map(_is_harmless, (owner._save_to_state_dict, owner.state_dict, *hooks)))


def _is_harmless(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "").startswith(_HARMLESS)


def _difference_of(owner: nn.Module) -> str:
    """Says what its state dict has and has not; "" where that is what the tensors below it are."""
    below, elsewhere = _tensors_below(owner)
    # Hooks of torch's wrappers take off what these have added to names.
    own = {plain_name(name): tensor for name, tensor in below.items()}
    beside = tuple(map(plain_name, elsewhere))
    state = owner.state_dict(keep_vars=True)
    saved = {plain_name(name): value for name, value in state.items()}
    for name, value in saved.items():
        if name.startswith(beside):
            continue
        if name not in own:
            return f"has '{name}'"
        if not _is_same(value, own[name]):
            return f"has another value as '{name}'"
    missing = [name for name in own if name not in saved]
    return f"lacks '{missing[0]}'" if missing else ""


def _tensors_below(owner: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What torch saves of a module, by name; and what the names begin with of what is kept in
    other processes."""
    own: dict[str, torch.Tensor] = {}
    elsewhere: list[str] = []
    for prefix, module in owner.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        if keeps_elsewhere(module):
            elsewhere.append(dot)
        kept = module._non_persistent_buffers_set
        buffers = {name: value for name, value in module._buffers.items() if name not in kept}
        for name, tensor in {**module._parameters, **buffers}.items():
            if tensor is not None:
                own[dot + name] = tensor
    return own, elsewhere


def _is_same(saved: Any, own: torch.Tensor) -> bool:
    if saved is own:
        return True
    if type(saved) not in (torch.Tensor, nn.Parameter) or saved.shape != own.shape:
        return False
    return saved.dtype == own.dtype and saved.data_ptr() == own.data_ptr()


def finish_loading(model: nn.Module, ranks: Ranks) -> None:
    """Lets modules that load in their own way do so, with the values that they have by now: they
    may derive others from them. The caller may write parameters."""
    owners = _owners_in(resharded_model(model))
    for owner in owners:
        if _loads_in_own_way(owner):
            _load_again(owner, ranks)
    for owner in reversed(owners):  # torch calls them behind those of the modules in it
        for hook in _own_post_hooks(owner):
            hook(owner, _IncompatibleKeys([], []))


def has_to_finish(model: nn.Module) -> bool:
    """Whether ``finish_loading()`` has anything to do."""
    return any(
        _loads_in_own_way(owner) or _own_post_hooks(owner)
        for owner in _owners_in(resharded_model(model))
    )


def _owners_in(plain: nn.Module) -> list[nn.Module]:
    return [owner for owner in plain.modules() if not keeps_elsewhere(owner) and _is_here(owner)]


def _is_here(owner: nn.Module) -> bool:
    """Whether this rank has all that is in a module."""
    return all(map(has_memory, [*owner.parameters(), *owner.buffers()]))


def _own_post_hooks(owner: nn.Module) -> list[Callable[..., Any]]:
    hooks = owner._load_state_dict_post_hooks.values()
    return [hook for hook in hooks if not _is_harmless(hook)]


def _loads_in_own_way(owner: nn.Module) -> bool:
    hooks = (getattr(it, "hook", it) for it in owner._load_state_dict_pre_hooks.values())
    return not all(map(_is_harmless, (owner._load_from_state_dict, *hooks)))


def _load_again(owner: nn.Module, ranks: Ranks) -> None:
    """Loads what its own parameters and buffers are into them. It sees the state of all that is
    below it, as under torch."""
    state = {
        name: tensor.detach() if "." in name else tensor.detach().clone()
        for name, tensor in _tensors_below(owner)[0].items()
    }
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    metadata = {"version": owner._version}
    owner._load_from_state_dict(state, "", metadata, True, missing, unexpected, errors)
    if errors or missing or unexpected:
        said = "; ".join(errors) or f"missing {missing}, unexpected {unexpected}"
        ranks.refuse(
            f"got a {type(owner).__qualname__} that does not load what it had saved: {said}",
            "Look at its _load_from_state_dict() and its hooks.",
        )
