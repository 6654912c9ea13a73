"""Loading a state into parameters that all ranks of a host share.

``load_state_dict()`` copies into a parameter, and every rank would copy into the same memory while
others read. So each module that holds parameters of a ZeroRedundancyOptimizer has a hook, which
gives them memory of their own before they are loaded. The next step, or ``trireme.writing()``,
takes in what was loaded, if it is the same on all ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trireme._core.owners import ShardedOptimizer, optimizer_of
from trireme._zero import refuse


class _BeforeLoading:
    """The hook. It knows nothing, so that it outlives optimizers and serves those that follow."""

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        loaded = [
            (prefix + name, parameter, optimizer)
            for name, parameter in module._parameters.items()
            if parameter is not None
            and prefix + name in state_dict
            and (optimizer := optimizer_of(parameter)) is not None
        ]
        assigns = loaded and local_metadata.pop("assign_to_params_buffers", False)
        for name, parameter, optimizer in loaded:
            place, index = optimizer._places[parameter]
            core = optimizer._cores[place]
            if assigns and not core.is_writing:
                _check_assigned(name, state_dict[name], parameter, optimizer)
            core.give_own_memory([index])

    def __reduce__(self) -> Any:
        """In a copy or a pickle of the module: something that does nothing and needs no Trireme."""
        return functools.partial, (itertools.chain,)


_BEFORE_LOADING = _BeforeLoading()


def watch_loading(modules: Iterable[nn.Module]) -> None:
    """Lets their ``load_state_dict()`` find parameters that it may write."""
    for module in modules:
        hooks = module._load_state_dict_pre_hooks.values()
        if all(getattr(hook, "hook", None) is not _BEFORE_LOADING for hook in hooks):
            module.register_load_state_dict_pre_hook(_BEFORE_LOADING)


def _check_assigned(
    name: str, value: Any, parameter: torch.Tensor, optimizer: ShardedOptimizer
) -> None:
    """``assign=True`` is to replace a parameter, which its optimizer would not know: it is copied
    instead, where that comes to the same."""
    if not isinstance(value, torch.Tensor):
        return  # torch has its own words for it
    if (value.dtype, value.device) != (parameter.dtype, parameter.device):
        refuse(
            f"got load_state_dict(assign=True) with {value.dtype} on {value.device} for '{name}', "
            f"expected {parameter.dtype} on {parameter.device}",
            "Load without assign=True, or make the optimizer after loading.",
            optimizer.process_group,
        )
