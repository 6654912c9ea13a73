"""All units under one root: what they share in a step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from trireme._C import Fsdp
from trireme._fsdp_checks import not_here, refuse

if TYPE_CHECKING:
    from trireme._fsdp_params import ShardedParameter
    from trireme._fsdp_unit import FsdpUnit


class FsdpRoot:
    """Made when the outermost unit is first used. Collective only if parameters were cast."""

    def __init__(self, unit: FsdpUnit) -> None:
        module = unit.modules[0]
        units = units_in(module)
        _check(units, unit)
        for one in units:
            one.follow_casts()
        self.units = units
        self.finalizes_manually = False
        self.gathers_dynamically = False
        self.divides_by_active_ranks = False
        prefixes = {one: name for name, one in module.named_modules()}
        self.params: list[ShardedParameter] = []
        for one in units:
            for param in one.params:
                owner, name = param.places[0]
                param.name = f"{prefixes[owner]}.{name}".removeprefix(".")
                self.params.append(param)
            if one.group is not None:  # what errors call it
                ends = dict.fromkeys((one.params[0].name, one.params[-1].name))
                one.group.label = " .. ".join(ends)
        groups = [one.group for one in units if one.group is not None]
        self.core: Fsdp | None = None
        if groups:
            self.core = Fsdp(
                groups=groups,
                names=[param.name for param in self.params],
                communicator=unit.mesh.communicator,
                replicates_with=unit.mesh.replicate_communicator,
            )
            held = weakref.ref(self)  # the core must not keep alive who keeps it

            def deliver(indices: list[int]) -> None:
                if (root := held()) is not None:
                    root.deliver(indices)

            self.core.set_delivered_callback(deliver)
        for one in units:
            one.root = self
            one.settle_reshard(is_root=one is unit)
        unit.is_root = True
        self.follow_flags()
        self.follow_gathers()

    def deliver(self, indices: list[int]) -> None:
        """This rank's parts of averaged gradients have come."""
        assert self.core is not None
        for index, part in zip(indices, self.core.take_gradients(indices), strict=True):
            self.params[index].receive(part)

    def settle(self) -> None:
        if self.core is not None and self.core.is_writing:
            for unit in self.units:
                unit.settle()

    def begin_writing(self) -> None:
        """Waits until no rank reads. Every rank must come."""
        if self.core is not None:
            self.core.begin_writing()

    def begin_writing_anew(self) -> None:
        """begin_writing() where some ranks may have read since they wrote and others have not: all
        take one turn of reading."""
        if self.core is not None:
            self.settle()
            self.core.begin_reading()
            self.core.begin_writing()

    def follow_flags(self) -> None:
        """Tells the core which units average gradients, and what they are divided by."""
        if self.core is not None:
            units = [unit for unit in self.units if unit.group is not None]
            self.core.set_synchronize([unit.synchronizes for unit in units])
            self.core.set_divide_factors([unit.divide_factor for unit in units])

    def follow_gathers(self) -> None:
        """Tells the core in which order units are gathered, where they are."""
        if self.core is None or not self.units[0].mesh.gathers:
            return
        if self.units[0].gathers_dynamically != self.gathers_dynamically:
            self.gathers_dynamically = self.units[0].gathers_dynamically
            self.core.set_dynamic_gather(self.gathers_dynamically)
        for unit in self.units:
            for setter, ahead in unit.ahead.items():
                if not set(ahead) <= set(self.units):
                    refuse("got a unit to prefetch that is not under this root", "Leave it out.")
                if unit.group is not None:
                    groups = [one.group for one in ahead if one.group is not None]
                    getattr(self.core, setter)(unit.group, groups)


def units_in(module: nn.Module) -> list[FsdpUnit]:
    """The units of ``module`` and in it, outer ones first."""
    found = (getattr(one, "_trireme_unit", None) for one in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def _check(units: list[FsdpUnit], root: FsdpUnit) -> None:
    for unit in units:
        if unit.root is not None:
            refuse(
                f"got a first forward of {type(root.modules[0]).__name__} after one of "
                f"{type(unit.modules[0]).__name__} in it, expected the outermost unit first",
                "Run the outermost unit before its parts.",
                kind=RuntimeError,
            )
        if not unit.mesh.is_like(root.mesh):
            not_here("units on different meshes under one root")
