"""Rounds of LocalSGD and DiLoCo, as checkpoints want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from trireme._C import Rounds


@dataclass(frozen=True)
class HeldRounds:
    """What rounds are made of. Parameters are in the order of ``core``."""

    core: Rounds
    model: nn.Module
    """Without wrappers."""
    optimizer: Optimizer
    """The inner one."""
    parameters: Sequence[torch.Tensor]
    outer: Sequence[Optimizer]
    targets: dict[torch.Tensor, torch.Tensor]
    """What outer optimizers step in place of a parameter; nothing of it where it has no
    elements."""


@runtime_checkable
class HoldsRounds(Protocol):
    """What ``rounds=`` takes."""

    def _held(self) -> HeldRounds:
        """Shows what it is made of; outer optimizers step anchors from now on."""
