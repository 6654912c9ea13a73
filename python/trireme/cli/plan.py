"""``python -m trireme plan``: what a model takes under each strategy, before it is made."""

import argparse
import dataclasses
import importlib
import json
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trireme._core.errors import Area
from trireme.memory_estimate import STRATEGIES, MemoryBytes, MemoryEstimate, estimate_memory

refuse = Area("plan").refuse

COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


def add_plan(commands: Any) -> None:
    """The subcommand and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="how much memory a model takes per rank and per host, under each strategy",
        description=(
            "Says what parameters, gradients, the optimizer's state and buffers take, per rank "
            "and per host, under each strategy. Nothing is allocated. Exit code 2: what was asked "
            "for contradicts itself."
        ),
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--numel", metavar="N", type=number, help="parameters, as in 7.5e9")
    model.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="what makes a torch.nn.Module without arguments; called on the meta device",
    )
    parser.add_argument("--world", metavar="W", type=int, required=True, help="ranks")
    parser.add_argument(
        "--ranks-per-host", metavar="R", type=int, help="of the fullest host (default: all)"
    )
    parser.add_argument(
        "--no-host-params",
        dest="host_params",
        action="store_false",
        help="ranks of a host share no memory for parameters: Gloo, GPUs",
    )
    parser.add_argument(
        "--unit",
        metavar="N",
        type=number,
        default=0,
        help="parameters of the largest unit of fully_shard, where units are gathered "
        "(default: the model is one)",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        choices=("all", *STRATEGIES),
        default=["all"],
        help="which rows (default: all)",
    )
    parser.add_argument(
        "--optimizer",
        type=lambda text: int(text) if text.isdecimal() else text,
        default="adamw",
        help="sgd, sgd_momentum, adam, adamw, or bytes of state per parameter (default: adamw)",
    )
    parser.add_argument("--dtype", help="of parameters given by --numel (default: float32)")
    parser.add_argument("--grad-dtype", metavar="DTYPE", help="of gradients, if another one")
    parser.add_argument(
        "--activations", metavar="BYTES", type=number, default=0, help="of each rank"
    )
    parser.add_argument(
        "--paper", action="store_true", help="count as the ZeRO paper: mixed precision, Adam"
    )
    parser.add_argument("--json", action="store_true", help="for programs, in bytes")


def plan(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit code."""
    try:
        estimates = _estimates(arguments)
    except (TypeError, ValueError) as error:
        print(str(error).split("\nException raised from")[0], file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([_as_dict(one) for one in estimates], indent=2))
    else:
        print("\n".join(_lines(estimates, arguments)))
    return 0


def number(text: str) -> int:
    """A whole number, also as 7.5e9; argparse says this function's name."""
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(text) if text.isdecimal() else int(value)


def _estimates(arguments: argparse.Namespace) -> list[MemoryEstimate]:
    per_host = _ranks_per_host(arguments)
    strategies: Sequence[str] = arguments.strategy
    if "all" in strategies:
        one_process = per_host == arguments.world or arguments.paper
        strategies = [one for one in STRATEGIES if one != "dp" or one_process]
    model = arguments.numel if arguments.model is None else _build(arguments.model)
    return [
        estimate_memory(
            model,
            strategy,
            1 if strategy == "single" else arguments.world,
            ranks_per_host=1 if strategy == "single" else per_host,
            optimizer=arguments.optimizer,
            dtype=_dtype(arguments.dtype),
            grad_dtype=_dtype(arguments.grad_dtype),
            activation_bytes=arguments.activations,
            host_params=arguments.host_params,
            unit_numel=arguments.unit if strategy == "zero3" else 0,
            accounting="paper" if arguments.paper else "trireme",
        )
        for strategy in strategies
    ]


def _ranks_per_host(arguments: argparse.Namespace) -> int:
    asked: int | None = arguments.ranks_per_host
    world: int = arguments.world
    return world if asked is None else asked


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        refuse(f"got dtype '{name}', expected one of torch", "Say for example bfloat16.")
    return dtype


def _build(path: str) -> nn.Module:
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        refuse(
            f"got --model {path}, expected MODULE:FACTORY",
            "Say for example my_models:make_gpt.",
        )
    try:
        factory = operator.attrgetter(attribute)(importlib.import_module(module_name))
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        refuse(
            f"--model {path} raised {type(error).__name__}: {error}, expected a torch.nn.Module",
            "It is imported from the current folder and called without arguments on the meta "
            "device.",
        )
    if not isinstance(model, nn.Module):
        refuse(
            f"--model {path} made {type(model).__name__}, expected a torch.nn.Module",
            "Name a function or class that makes the model.",
        )
    return model


def _as_dict(estimate: MemoryEstimate) -> dict[str, Any]:
    made = dataclasses.asdict(estimate)
    for place in ("rank", "host"):
        found: MemoryBytes = getattr(estimate, place)
        made[place] |= {"model_states": found.model_states, "total": found.total}
    return made


def _lines(estimates: Sequence[MemoryEstimate], arguments: argparse.Namespace) -> list[str]:
    optimizer = arguments.optimizer
    counted = f"{optimizer}, on CPU"
    if arguments.paper:
        counted = "as the ZeRO paper counts"
    elif isinstance(optimizer, int):
        counted = f"{optimizer} bytes of state per parameter, on CPU"
    ranks = f"{arguments.world} ranks, {_ranks_per_host(arguments)} on a host"
    lines = [f"{estimates[0].numel:,} parameters, {ranks}; {counted}"]
    for place in ("rank", "host"):
        found: list[MemoryBytes] = [getattr(one, place) for one in estimates]
        most = max(one.total for one in found)
        scale, unit = next((one for one in UNITS if most >= one[0]), UNITS[-1])
        lines += ["", f"{unit} per {place}".ljust(12) + "".join(f"{one:>13}" for one in COLUMNS)]
        for estimate, taken in zip(estimates, found, strict=True):
            numbers = (getattr(taken, column) / scale for column in COLUMNS)
            lines.append(f"{estimate.strategy:<12}" + "".join(f"{one:>13.2f}" for one in numbers))
    return lines
