"""Writes of parameters and states are announced, so that a save in flight can copy them first."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trireme import _C

_watched: list[Any] = []


def announce_steps() -> None:
    """From now on each ``step()`` of an optimizer first has what it writes kept, where a save reads
    it (csrc/memory/snapshot.h)."""
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _C.has_snapshots():
        _C.keep_snapshots_of(
            [param for group in optimizer.param_groups for param in group["params"]]
        )


def before_writing() -> None:
    """Returns when nobody reads parameters or states in place that a save has noted."""
    if _C.has_snapshots():
        _C.keep_all_snapshots()
