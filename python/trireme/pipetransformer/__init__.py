"""Freezing layers while a model trains, and what that makes cheaper: docs/pipetransformer.md."""

from trireme._C import FreezePoint
from trireme.pipetransformer.freeze import Freeze, freeze_schedule
from trireme.pipetransformer.trainer import PipeTransformer

__all__ = ["Freeze", "FreezePoint", "PipeTransformer", "freeze_schedule"]
