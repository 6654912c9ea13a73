"""All units under one root: what they share in a step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from trireme._C import Fsdp, FsdpRanks, KeptCodes
from trireme._core.compression import core_of
from trireme._core.joined_steps import JoinedSteps
from trireme._core.layer_watch import LayerWatch
from trireme._core.writing import call_before_writing_shards
from trireme._fsdp import refuse
from trireme._fsdp.checks import check_mesh_within
from trireme._fsdp.comms import (
    check_scattering,
    customizable,
    group_of_memory,
    say_no_memory,
    use_reduce_scatter,
)
from trireme._fsdp.params import check_data, user_hooks

if TYPE_CHECKING:
    from trireme._fsdp.mesh import FsdpMesh
    from trireme._fsdp.params import ShardedParameter
    from trireme._fsdp.unit import FsdpUnit


class FsdpRoot:
    """Made when the outermost unit is first used. Collective only if parameters were cast, or
    units that gather are on several meshes.

    ``meshes`` are those of the units, the outermost one's first; ``mesh_of`` says which of them
    each unit with parameters has (csrc/strategies/fsdp/unit_reducers.h).
    """

    def __init__(self, unit: FsdpUnit) -> None:
        module = unit.modules[0]
        units = units_in(module)
        _check(units, unit)
        self.compression = unit.compression
        for inner in units:
            inner.follow_casts()
        self.units = units
        self.offloads = any(unit.offload is not None for unit in units)
        self.finalizes_manually = False
        self.gathers_dynamically = False
        self.divides_by_active_ranks = False
        self.joined: JoinedSteps | None = None
        prefixes = {inner: name for name, inner in module.named_modules()}
        self.params: list[ShardedParameter] = []
        for inner in units:
            for param in inner.params:
                owner, name = param.places[0]
                param.name = f"{prefixes[owner]}.{name}".removeprefix(".")
                self.params.append(param)
            if inner.group is not None:  # what errors call it
                ends = dict.fromkeys((inner.params[0].name, inner.params[-1].name))
                inner.group.label = " .. ".join(ends)
        self.meshes = [unit.mesh]
        self.mesh_of = {unit: self._place_of(unit.mesh) for unit in units if unit.group is not None}
        self.scatters_with = [
            customizable(mesh.shard_communicator if mesh.gathers else None) for mesh in self.meshes
        ]
        self.gathers = any(unit.mesh.gathers for unit in self.mesh_of)
        self.core: Fsdp | None = None
        if self.mesh_of:
            agrees = self.gathers and len(self.meshes) > 1
            self.core = Fsdp(
                groups=[unit.group for unit in self.mesh_of if unit.group is not None],
                names=[param.name for param in self.params],
                ranks=[
                    FsdpRanks(mesh.communicator, mesh.replicate_communicator, scatters_with)
                    for mesh, scatters_with in zip(self.meshes, self.scatters_with, strict=True)
                ],
                ranks_of=list(self.mesh_of.values()),
                agrees_with=unit.mesh.twin_communicator if agrees else None,
                compression=core_of(self.compression),
            )
            held = weakref.ref(self)  # the core must not keep alive who keeps it

            def deliver(indices: list[int], parts: list[torch.Tensor]) -> None:
                if (root := held()) is not None:
                    root.deliver(indices, parts)

            self.core.set_gradient_callback(deliver)
        for part in unit.all:
            part.is_root = True
        for inner in units:
            inner.root = self
            inner.follow_reshard()
        self._layer_watch = LayerWatch(module, by_identity=False)
        self._plain = list(_plain_parameters(module).values())
        self.follow_gathers()
        self.comms_changed = True
        self.follow_comms()

    def kept_codes(self) -> list[KeptCodes]:
        """What codes keep of gradients, by the names of parameters.

        Ranks of tensor parallelism have other values under one name: each has names of its own.
        """
        kept = [] if self.core is None else self.core.kept_codes()
        for one in kept:
            one.rename([param.name + param.model_part() for param in self.params], "")
        return kept

    def check_layers(self) -> None:
        """Before a forward: refuses parameters that came after the first one, since nobody would
        average their gradients.

        Raises:
            ValueError: there is one.
        """
        if self._layer_watch.is_as_it_was():
            return
        known = set(map(id, self._plain))
        for name, param in _plain_parameters(self.units[0].modules[0]).items():
            if param.requires_grad and id(param) not in known:
                refuse(
                    f"got '{name}' of shape {tuple(param.shape)}, which came after fully_shard",
                    "Change layers before fully_shard, or call it on the layer itself, too.",
                )
        self._layer_watch.take_snapshot()

    def _place_of(self, mesh: FsdpMesh) -> int:
        for place, known in enumerate(self.meshes):
            if mesh.is_like(known):
                return place
        self.meshes.append(mesh)
        return len(self.meshes) - 1

    def deliver(self, indices: list[int], parts: list[torch.Tensor]) -> None:
        """This rank's parts of averaged gradients have come."""
        assert self.core is not None
        if self.offloads and any(_reads_at_once(self.params[index]) for index in indices):
            self.core.wait_for_gradients()
        for index, part in zip(indices, parts, strict=True):
            self.params[index].receive(part)

    def copy_back(self, casts_wait: bool = False) -> None:
        if self.core is not None and self.core.is_writing:
            moved = [unit for unit in self.units if not unit.is_in_place]
            check_data((unit.group, unit.params) for unit in moved if unit.group is not None)
            for unit in moved:
                unit.copy_back(casts_wait)

    def begin_writing(self) -> None:
        """Waits until no rank reads. Every rank must come."""
        if self.core is not None:
            self.core.begin_writing()

    def begin_writing_anew(self) -> None:
        """begin_writing() where some ranks may have read since they wrote and others have not: all
        take one turn of reading."""
        if self.core is not None:
            self.copy_back(casts_wait=True)
            self.core.begin_reading()
            self.core.begin_writing()

    def follow_comms(self) -> None:
        """Before a forward, when all units have been told: by what gradients are scattered, and
        whose memory is used."""
        if self.core is not None and self.comms_changed:
            if self.compression is not None:
                check_scattering(self.units)
            for place, scatters_with in enumerate(self.scatters_with):
                use_reduce_scatter(
                    scatters_with, [unit for unit, its in self.mesh_of.items() if its == place]
                )
            groups = group_of_memory(self.units)
            if not self.core.allocate_from(groups) and groups is not None:
                say_no_memory(groups)
        self.comms_changed = False

    def follow_gathers(self) -> None:
        """Tells the core in which order units are gathered, where they are."""
        if self.core is None or not self.gathers:
            return
        if self.units[0].gathers_dynamically != self.gathers_dynamically:
            self.gathers_dynamically = self.units[0].gathers_dynamically
            self.core.set_dynamic_gather(self.gathers_dynamically)
        for unit in self.units:
            for setter, ahead in unit.ahead.items():
                if not set(ahead) <= set(self.units):
                    refuse(
                        "got a unit to prefetch that is not under this root",
                        "Leave it out.",
                    )
                if unit.group is not None:
                    groups = [
                        of_mesh.group
                        for later in ahead
                        for of_mesh in later.all
                        if of_mesh.group is not None
                    ]
                    getattr(self.core, setter)(unit.group, groups)


def _reads_at_once(param: ShardedParameter) -> bool:
    """Whether ``receive()`` reads a gradient, or lets the user do so, before backward is over."""
    sharded = param.sharded
    assert sharded is not None
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sharded.grad is not None or any(user_hooks(sharded, kind) for kind in kinds)


def units_in(module: nn.Module) -> list[FsdpUnit]:
    """The units of ``module`` and in it, outer ones first."""
    found = (getattr(inner, "_trireme_unit", None) for inner in module.modules())
    firsts = dict.fromkeys(unit for unit in found if unit is not None)
    return [unit for first in firsts for unit in first.all]


def _begin_writing_shards(module: nn.Module) -> None:
    """Waits until no rank reads the units in ``module``; before the first forward nobody does."""
    units = units_in(module)
    for unit in units:
        unit.reshard()
    for root in dict.fromkeys(unit.root for unit in units if unit.root is not None):
        root.begin_writing_anew()


call_before_writing_shards(_begin_writing_shards)


def _plain_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """By name, what no unit has: fully_shard was told to ignore it, or it came later."""
    places = {
        (id(owner), name)
        for unit in units_in(module)
        for param in unit.params
        for owner, name in param.places
    }
    return {
        f"{prefix}.{name}".removeprefix("."): param
        for prefix, layer in module.named_modules()
        for name, param in layer._parameters.items()
        if param is not None and (id(layer), name) not in places
    }


def _check(units: list[FsdpUnit], root: FsdpUnit) -> None:
    for unit in units:
        if unit.root is not None:
            refuse(
                f"got a first forward of {type(root.modules[0]).__name__} after one of "
                f"{type(unit.modules[0]).__name__} in it, expected the outermost unit first",
                "Run the outermost unit before its parts.",
                kind=RuntimeError,
            )
        if unit.compression not in (None, root.compression):
            refuse(
                f"got compression {unit.compression} of {type(unit.modules[0]).__name__} inside of "
                f"{type(root.modules[0]).__name__}, which has {root.compression}",
                "Give it to the outermost unit, and inner units none.",
            )
        check_mesh_within(unit, root)
