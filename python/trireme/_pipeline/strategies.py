"""Strategies around layers of a pipeline: they average gradients once per step, at its end."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trireme._C import Ddp, DeferredSync
from trireme._core.owners import unit_of
from trireme._pipeline import refuse


class Strategies:
    """Those around some layers, of which the core does not know by itself."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.held: list[DeferredSync] = []
        self.parameters: set[int] = set()
        """The ids of parameters that they average."""
        self._inside: set[nn.Module] = set()
        units: set[int] = set()
        modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                if not isinstance(getattr(module, "_core", None), Ddp):  # the core knows ours
                    self._hold_torchs_ddp(module)
            elif isinstance(module, FSDPModule):
                self._hold_sharded(module, units)

    def _hold_torchs_ddp(self, module: DistributedDataParallel) -> None:
        if module.find_unused_parameters:
            got = "got a layer in torch's DistributedDataParallel with find_unused_parameters=True"
            refuse(got, "Use trireme.DistributedDataParallel.", kind=NotImplementedError)
        before: bool | None = None  # the flag, while it is held

        def hold(held: bool) -> None:
            nonlocal before
            if held and before is None:
                before = module.require_backward_grad_sync
                module.require_backward_grad_sync = False
            elif not held and before is not None:
                module.require_backward_grad_sync, before = before, None

        def prepare() -> None:
            if before:
                module.reducer.prepare_for_backward([])

        def finish() -> None:
            module.require_forward_param_sync = bool(before)

        self.held.append(DeferredSync(hold, prepare, finish))
        self.parameters.update(
            id(parameter) for parameter in module.parameters() if parameter.requires_grad
        )

    def _hold_sharded(self, module: FSDPModule, units: set[int]) -> None:
        assert isinstance(module, nn.Module)
        parameters = list(module.parameters())
        if module not in self._inside and not any(unit_of(parameter) for parameter in parameters):
            self._inside.update(module.modules())
            self._hold_torchs_units(module)
        for unit in filter(None, map(unit_of, parameters)):
            if id(unit) not in units:
                units.add(id(unit))
                self.held.append(unit.deferred_sync())
        self.parameters.update(map(id, parameters))

    def _hold_torchs_units(self, module: FSDPModule) -> None:
        if not hasattr(module, "finalize_backward"):
            refuse(
                "got a layer that torch's fully_shard has sharded, and a torch before 2.15",
                "Use trireme.fully_shard.",
                kind=NotImplementedError,
            )

        def synchronize(flag: bool) -> None:
            module.set_requires_gradient_sync(flag)
            module.set_reshard_after_backward(flag)

        is_final = False

        def hold(held: bool) -> None:
            nonlocal is_final
            if held or is_final:  # torch refuses a change while gradients accumulate
                module.set_manual_backward_finalization(held)
            synchronize(not held)
            is_final = False

        def finish() -> None:
            nonlocal is_final
            synchronize(True)
            module.finalize_backward()
            is_final = True

        def prepare() -> None:
            """It is finish() that averages."""

        self.held.append(DeferredSync(hold, prepare, finish))
