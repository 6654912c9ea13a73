"""``plan --checkpoint``: activations, counted from one forward of the model."""

from __future__ import annotations

import argparse
import importlib
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trireme._core.errors import Area
from trireme.activation_estimate import WAYS, ActivationEstimate, MeasuredModel, measure_model

refuse = Area("plan").refuse

CHECKPOINTS = ("except_last", "always")  # only pipelines have these


def add_counting(parser: argparse.ArgumentParser, memory: Callable[[str], int]) -> None:
    """The options of it; `memory` reads bytes."""
    parser.add_argument(
        "--checkpoint",
        choices=(*WAYS, *CHECKPOINTS),
        help="count activations of a rank from one forward of --model that allocates nothing: as "
        "they are (never), in segments (sqrt: checkpoint_sequential), or recomputed as --budget "
        "asks for (auto); with --pipeline what its checkpoint= recomputes: never (which it counts "
        "without this, too), except_last, always, auto",
    )
    parser.add_argument(
        "--input",
        metavar="SHAPE[:DTYPE]",
        action="append",
        default=[],
        help="of a rank, as in 8,128:int64; once per input of the model (default: float32)",
    )
    parser.add_argument(
        "--sample", metavar="MODULE:FACTORY", help="what makes the inputs: a tensor, tuple or dict"
    )
    parser.add_argument(
        "--budget", metavar="BYTES", type=memory, help="what activations may take, with auto"
    )


def count_activations(arguments: argparse.Namespace) -> ActivationEstimate | None:
    """Counts if `--checkpoint` was given. Raises ValueError for options that go not together."""
    given = bool(arguments.input or arguments.sample or arguments.budget is not None)
    if arguments.checkpoint is None:
        if given:
            got = "got --input, --sample or --budget without --checkpoint, expected all or none"
            refuse(got, "Say for example --checkpoint never.")
        return None
    if arguments.checkpoint in CHECKPOINTS:
        got = f"got --checkpoint {arguments.checkpoint} without --pipeline, expected both"
        refuse(got, f"Say --pipeline 4, or one of {', '.join(WAYS)}.")
    if arguments.activations is not None:
        got = "got --activations and --checkpoint, expected one of them"
        refuse(got, "Leave --activations out to have them counted.")
    if arguments.model is None or bool(arguments.input) == bool(arguments.sample):
        got = "got --checkpoint, expected --model with it, and either --input or --sample"
        refuse(got, "Say for example --model my_models:make_gpt --input 8,128:int64.")
    return _measured(arguments).estimate(arguments.checkpoint, arguments.budget)


def line_of(found: ActivationEstimate) -> str:
    """What was counted, for a reader."""
    layers = f"{found.layers} layers" + (f" of '{found.where}'" if found.where else "")
    return (
        f"{found.bytes / 2**20:,.1f} MiB of activations: {found.recomputed} of {layers} "
        f"recomputed, which takes {found.extra_share:.2f} of a forward; a loss outside of the "
        "model is not counted"
    )


def make_model(path: str, mode: AbstractContextManager[Any], where: str = "") -> nn.Module:
    """Returns the module of `--model`, made in a mode."""
    model = _made("--model", path, mode, f"a torch.nn.Module{where}")
    if not isinstance(model, nn.Module):
        refuse(
            f"--model {path} made {type(model).__name__}, expected a torch.nn.Module",
            "Name a function or class that makes the model.",
        )
    return model


def _made(option: str, path: str, mode: AbstractContextManager[Any], expected: str) -> Any:
    """Returns what the function or class MODULE:FACTORY makes. Raises ValueError if it does not."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        refuse(
            f"got {option} {path}, expected MODULE:FACTORY",
            "Say for example my_models:make_gpt.",
        )
    try:
        factory = operator.attrgetter(attribute)(importlib.import_module(module_name))
        with mode:
            return factory()
    except Exception as error:
        if _needs_values(error):
            raise
        refuse(
            f"{option} {path} raised {type(error).__name__}: {error}, expected {expected}",
            "It is imported from the current folder and called without arguments.",
        )


def make_sample(arguments: argparse.Namespace, mode: AbstractContextManager[Any]) -> Any:
    """Returns what `--sample` makes in a mode, or a list of the inputs that `--input` describes."""
    if arguments.sample:
        return _made("--sample", arguments.sample, mode, "inputs of the model")
    with mode:
        return [_input(text) for text in arguments.input]


def _measured(arguments: argparse.Namespace) -> MeasuredModel:
    """Measures with tensors that have no memory; with real ones if the model asks for values."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second

    try:
        return _measure(arguments, FakeTensorMode(allow_non_fake_inputs=True))
    except Exception as error:
        if not _needs_values(error):
            raise
        return _measure(arguments, nullcontext())


def _needs_values(error: Exception) -> bool:
    """Whether it says that a tensor without memory has no value, or an operator cannot do so."""
    return type(error).__module__.startswith("torch._subclasses")


def _measure(arguments: argparse.Namespace, mode: AbstractContextManager[Any]) -> MeasuredModel:
    sample = make_sample(arguments, mode)
    kwargs = sample if isinstance(sample, dict) else {}
    several = isinstance(sample, list | tuple)
    inputs = () if kwargs else sample if several else (sample,)
    model = make_model(arguments.model, mode)
    try:
        with mode:
            return measure_model(model, *inputs, **kwargs)
    except Exception as error:
        if _needs_values(error):
            raise
        refuse(
            f"the forward raised {type(error).__name__}: {error}, expected it to run",
            "Say with --input or --sample what the model takes, or with --activations what it "
            "keeps.",
        )


def _input(text: str) -> torch.Tensor:
    """Zeros of integers, which any table has; other numbers are random."""
    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split(",") if size]
    except ValueError:
        shape = [-1]
    if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
        refuse(f"got --input {text}, expected SHAPE[:DTYPE]", "Say for example 8,128:int64.")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)
