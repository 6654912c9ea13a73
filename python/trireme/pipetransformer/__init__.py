"""Freezing layers while a model trains, and what that makes cheaper: docs/pipetransformer.md."""

from trireme._C import FreezePoint
from trireme.pipetransformer.freeze import Freeze, freeze_schedule

__all__ = ["Freeze", "FreezePoint", "freeze_schedule"]
