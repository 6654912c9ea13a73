"""Transformers' Trainer over the backend trireme, with Trireme's classes.

Import this module before ``TrainingArguments`` are made: these make the process group of CPU ranks,
and after this import it is that of ``trireme.init()``.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from transformers import trainer, training_args

from trireme import _C
from trireme._C import error_text
from trireme.integrations.accelerate import Accelerator, as_accelerate_reads
from trireme.integrations.tested_versions import say_if_untested
from trireme.integrations.torch_names import replaced
from trireme.launch import init

__all__ = ["Seq2SeqTrainer", "Trainer"]


class _StateOverTrireme(PartialState):
    """Accelerate's state of a process, whose group of CPU ranks is over trireme."""

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        is_alone = _C.read_launch_environment(None, None).world == 1
        cpu = cpu or not torch.accelerator.is_available()
        if self.initialized or is_alone or not cpu or options.get("backend") is not None:
            super().__init__(cpu, **options)
            return
        with as_accelerate_reads(init(device="cpu", timeout=options.pop("timeout", None))):
            super().__init__(cpu, **options)


class _AcceleratesWithTrireme:
    """A Trainer whose accelerator is ``trireme.integrations.accelerate.Accelerator``."""

    def create_accelerator_and_postprocess(self) -> None:
        if dist.is_initialized() and dist.get_backend() == "gloo":
            _say_gloo()
        with replaced([(trainer, "Accelerator", Accelerator)]):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]


class Trainer(_AcceleratesWithTrireme, transformers.Trainer):
    """``transformers.Trainer`` whose accelerator is Trireme's.

    ``TrainingArguments`` stay as they are; on the CPU with ``use_cpu=True``.
    """


class Seq2SeqTrainer(_AcceleratesWithTrireme, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` whose accelerator is Trireme's."""


def _say_gloo() -> None:
    if dist.get_rank() == 0:
        got = "got a process group over gloo, expected one over trireme"
        next_step = (
            "Import trireme.integrations.transformers before TrainingArguments are made, and leave "
            "out ddp_backend."
        )
        warnings.warn(error_text("integrations", got, next_step), stacklevel=4)


say_if_untested("transformers")
# TrainingArguments make the state as soon as they are made themselves, long before a Trainer is.
training_args.PartialState = _StateOverTrireme
