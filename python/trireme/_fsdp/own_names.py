"""What a sharded module has beyond torch's FSDPModule: behind all that the user has named."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from trireme._fsdp import refuse
from trireme._fsdp.checks import check_outermost
from trireme._fsdp.join import FsdpJoinHook


class _Behind:
    """An attribute that the module's own comes before: one of its class or a base, one that was set
    (there is no ``__set__``), or a parameter, a buffer or a module of this name."""

    def __init__(self, function: Callable[..., Any], bind: Callable[..., Any]) -> None:
        self.function, self.bind = function, bind
        self.name, self.__doc__ = function.__name__, function.__doc__

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        for kind in ("_parameters", "_buffers", "_modules"):
            if self.name in module.__dict__[kind]:
                return module.__dict__[kind][self.name]
        return self.bind(self.function, module)


def _method(function: Callable[..., Any]) -> Any:
    return _Behind(function, MethodType)


def _value(function: Callable[..., Any]) -> Any:
    return _Behind(function, lambda call, module: call(module))


class OwnNames(Joinable):
    """The last but Joinable of the bases of what ``fully_shard`` makes of a module's class."""

    _join_config = _JoinConfig.construct_disabled_join_config()

    @_method
    def set_dynamic_gather(self: Any, dynamic: bool) -> None:
        """On the outermost unit, the same on all ranks: with ``dynamic`` each rank may use other
        units than the others, in any order and as often as it likes, and nothing is gathered that
        nobody needs. Costs one small collective per unit and pass. Without, orders may change, too,
        but on all ranks alike (csrc/param/prefetch.h)."""
        unit = self._trireme_unit
        check_outermost(unit, "set_dynamic_gather")
        unit.gathers_dynamically = dynamic
        if unit.root is not None:
            unit.root.follow_gathers()

    @_method
    def last_step(self: Any) -> dict[str, float]:
        """Says where the time of the last synchronized backward went; keys as in DDP's."""
        core = self._trireme_unit.own_root().core
        return {} if core is None else core.last_step()

    # uneven inputs

    @_method
    def join_hook(self: Any, **kwargs: Any) -> JoinHook:
        """For ``Join([model], optimizer=optimizer)``, on the outermost unit.

        A rank that has joined takes part in the others' backwards with zeros, and steps its shards
        with ``optimizer``. ``divide_by_initial_world_size`` as for DDP. One more small all-reduce
        per forward.
        """
        optimizer = kwargs.get("optimizer")
        if optimizer is None:
            got = "got Join without the optimizer, which steps this rank's shards"
            refuse(got, "Pass it: Join([model], optimizer=optimizer).")
        return FsdpJoinHook(self, optimizer, kwargs.get("divide_by_initial_world_size", True))

    @_value
    def join_device(self: Any) -> torch.device:
        """Says where torch's ``Join`` puts the tensor by which ranks tell whether they have
        inputs."""
        return self._trireme_unit.mesh.device

    @_value
    def join_process_group(self: Any) -> Any:
        """The group over which torch's ``Join`` counts the ranks that have inputs."""
        return self._trireme_unit.mesh.group
