"""What the modules of a unit call before their state is read or loaded."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from trireme._fsdp.unit import FsdpUnit


class StateHooks:
    """Those of one unit. Every module that has parameters of it holds these, and plain layers are
    copied by themselves: so the unit is held weakly, and a copy does nothing until it is given the
    copy of the unit by ``follow()``, if there is one."""

    def __init__(self) -> None:
        self._unit: weakref.ref[FsdpUnit] | None = None

    def follow(self, unit: FsdpUnit) -> None:
        self._unit = weakref.ref(unit)

    def register(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self.before_state_dict)
        module.register_load_state_dict_pre_hook(self.before_load)

    def before_state_dict(self, *_: Any) -> None:
        unit = None if self._unit is None else self._unit()
        if unit is not None:
            unit.show_sharded()

    def before_load(self, *_: Any) -> None:
        unit = None if self._unit is None else self._unit()
        if unit is None:
            return
        unit.show_sharded()
        if unit.root is not None:
            unit.root.begin_writing_anew()

    def __reduce__(self) -> tuple[type[StateHooks], tuple[()]]:
        """Copies and pickles are without a unit."""
        return StateHooks, ()
