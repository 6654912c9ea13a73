"""The gate in front of optimizers: nobody writes what another rank of the host may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trireme._core.owners import unit_of
from trireme._fsdp import refuse
from trireme._fsdp.join import share_step
from trireme._fsdp.root import FsdpRoot
from trireme._fsdp.unit import FsdpUnit

_watched: list[Any] = []


def watch_optimizers() -> None:
    """From now on each ``step()`` of an optimizer that holds sharded parameters waits first."""
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    units = _units_of(optimizer)
    if not units:
        return None
    for root in _roots_of(units):
        share_step(root, optimizer)
    begin_writing(units)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    gated = _gated(closure, units)
    if len(args) > 1:
        return (args[0], gated, *args[2:]), kwargs
    return args, {**kwargs, "closure": gated}


def begin_writing(units: list[FsdpUnit]) -> None:
    """Waits for the roots of ``units``; those that have none yet were not read."""
    for root in _roots_of(units):
        root.begin_writing()


def _gated(closure: Callable[[], Any], units: list[FsdpUnit]) -> Callable[[], Any]:
    """Gates what a closure reads, which the optimizer writes afterwards. It may be the first to
    read."""

    def call() -> Any:
        result = closure()
        begin_writing(units)
        return result

    return call


def _roots_of(units: list[FsdpUnit]) -> list[FsdpRoot]:
    return list(dict.fromkeys(unit.root for unit in units if unit.root is not None))


def _units_of(optimizer: Optimizer) -> list[FsdpUnit]:
    units: dict[FsdpUnit, None] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            unit = unit_of(param)
            if isinstance(unit, FsdpUnit):
                units[unit] = None
            else:
                _check_not_replaced(param)
    return list(units)


def _check_not_replaced(param: Any) -> None:
    name = getattr(param, "_trireme_sharded", None)
    if name is not None:
        refuse(
            f"got an optimizer of '{name}' as it was before fully_shard, which trains nothing",
            "Make the optimizer after the last fully_shard.",
            kind=RuntimeError,
        )
