"""``python -m trireme plan``: what a model takes under each strategy, before it is made."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from trireme._core.errors import Area
from trireme.activation_estimate import ActivationEstimate
from trireme.cli.counted_activations import add_counting, count_activations, line_of, make_model
from trireme.cli.pipeline_plan import add_pipeline, expect_options, plan_pipeline
from trireme.cli.table import COLUMNS, dtype_of, unit_for
from trireme.memory_estimate import (
    OTHER_NAMES,
    STRATEGIES,
    MemoryBytes,
    MemoryEstimate,
    estimate_memory,
)

refuse = Area("plan").refuse

MEMORY_UNITS = {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
} | {"": 1, "B": 1, "KiB": 1024}


def add_plan(commands: Any) -> None:
    """The subcommand and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="how much memory a model takes per rank and per host, under each strategy",
        description=(
            "Says what parameters, gradients, the optimizer's state and buffers take, per rank "
            "and per host, under each strategy; fsdp is fully_shard. With --memory it says which "
            "of them fit. With --pipeline: what each rank of a pipeline takes, and its bubble. "
            "Nothing is allocated. Exit code 2: what was asked for contradicts itself."
        ),
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--numel", metavar="N", type=number, help="parameters, as in 7.5e9")
    model.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="what makes a torch.nn.Module without arguments; called on the meta device",
    )
    _add_places(parser)
    parser.add_argument(
        "--strategy",
        nargs="+",
        type=lambda name: OTHER_NAMES.get(name, name),
        choices=("all", *STRATEGIES),
        default=["all"],
        help="which rows (default: all); zero3 and fully_shard are fsdp",
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
        "--activations", metavar="BYTES", type=number, help="of each rank (default: 0)"
    )
    add_counting(parser, memory)
    add_pipeline(parser)
    parser.add_argument(
        "--paper", action="store_true", help="count as the ZeRO paper: mixed precision, Adam"
    )
    parser.add_argument("--json", action="store_true", help="for programs, in bytes")


def _add_places(parser: argparse.ArgumentParser) -> None:
    """Options that say where ranks are, and how much memory there is."""
    parser.add_argument("--world", metavar="W", type=number, help="ranks")
    parser.add_argument(
        "--ranks-per-host", metavar="R", type=number, help="of the fullest host (default: all)"
    )
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        type=memory,
        help="of each host, as in 64GiB: which strategies fit, and how many ranks the others need",
    )
    parser.add_argument(
        "--gpus",
        action="store_true",
        help="each rank is a GPU with memory of its own: no table per host, and --memory is that "
        "of one GPU",
    )
    parser.add_argument(
        "--no-host-params",
        dest="host_params",
        action="store_false",
        help="ranks of a host share no memory for parameters: Gloo",
    )
    parser.add_argument(
        "--unit",
        metavar="N",
        type=number,
        default=0,
        help="parameters of the largest unit of fully_shard, where units are gathered "
        "(default: the model is one)",
    )


def plan(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit code."""
    try:
        expect_options(arguments)
        if arguments.pipeline is not None:
            print(plan_pipeline(arguments))
            return 0
        counted = count_activations(arguments)
        estimates = _estimates(arguments, counted)
    except (TypeError, ValueError) as error:
        print(str(error).split("\nException raised from")[0], file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([_as_dict(estimate, counted) for estimate in estimates], indent=2))
    else:
        lines = _lines(estimates, arguments)
        if counted is not None:
            lines.insert(1, line_of(counted))
        print("\n".join(lines))
    return 0


def number(text: str) -> int:
    """A whole number, also as 7.5e9; argparse says this function's name."""
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(text) if text.isdecimal() else int(value)


def memory(text: str) -> int:
    """Bytes, as in 24GiB or 16e9; argparse says this function's name."""
    digits = text.rstrip("kKMGTiB")
    unit = text[len(digits) :]
    if unit not in MEMORY_UNITS or not math.isfinite(float(digits) * MEMORY_UNITS[unit]):
        raise ValueError
    return int(float(digits) * MEMORY_UNITS[unit])


def _estimates(
    arguments: argparse.Namespace, counted: ActivationEstimate | None
) -> list[MemoryEstimate]:
    per_host = 1 if arguments.gpus else _ranks_per_host(arguments)
    strategies: Sequence[str] = list(dict.fromkeys(arguments.strategy))
    if "all" in strategies:
        one_process = per_host == arguments.world or arguments.paper
        strategies = [strategy for strategy in STRATEGIES if strategy != "dp" or one_process]
    model = arguments.numel
    if arguments.model is not None:
        model = make_model(arguments.model, torch.device("meta"), " on the meta device")
    activations = (arguments.activations or 0) if counted is None else counted.bytes
    return [
        estimate_memory(
            model,
            strategy,
            1 if strategy == "single" else arguments.world,
            ranks_per_host=1 if strategy == "single" else per_host,
            optimizer=arguments.optimizer,
            dtype=dtype_of(arguments.dtype),
            grad_dtype=dtype_of(arguments.grad_dtype),
            activation_bytes=activations,
            host_params=arguments.host_params and (arguments.paper or not arguments.gpus),
            unit_numel=arguments.unit if strategy == "fsdp" else 0,
            accounting="paper" if arguments.paper else "trireme",
            memory=arguments.memory,
            memory_of="rank" if arguments.gpus else "host",
        )
        for strategy in strategies
    ]


def _ranks_per_host(arguments: argparse.Namespace) -> int:
    asked: int | None = arguments.ranks_per_host
    world: int = arguments.world
    return world if asked is None else asked


def _as_dict(estimate: MemoryEstimate, counted: ActivationEstimate | None) -> dict[str, Any]:
    made = dataclasses.asdict(estimate)
    for place in ("rank", "host"):
        found: MemoryBytes = getattr(estimate, place)
        made[place] |= {"model_states": found.model_states, "total": found.total}
    if counted is not None:
        made["counted_activations"] = dataclasses.asdict(counted)
    return made


def _lines(estimates: Sequence[MemoryEstimate], arguments: argparse.Namespace) -> list[str]:
    optimizer = arguments.optimizer
    place = "on GPUs" if arguments.gpus else "on CPU"
    counted = f"{optimizer}, {place}"
    if arguments.paper:
        counted = "as the ZeRO paper counts"
    elif isinstance(optimizer, int):
        counted = f"{optimizer} bytes of state per parameter, {place}"
    on_a_host = _ranks_per_host(arguments)
    ranks = f"{arguments.world} ranks, " + (
        "each a GPU with memory of its own" if arguments.gpus else f"{on_a_host} on a host"
    )
    lines = [f"{estimates[0].numel:,} parameters, {ranks}; {counted}"]
    for place in ("rank",) if arguments.gpus else ("rank", "host"):
        found: list[MemoryBytes] = [getattr(estimate, place) for estimate in estimates]
        most = max(estimate.total for estimate in found)
        scale, unit = unit_for(most)
        lines += [
            "",
            f"{unit} per {place}".ljust(12) + "".join(f"{column:>13}" for column in COLUMNS),
        ]
        for estimate, taken in zip(estimates, found, strict=True):
            numbers = (getattr(taken, column) / scale for column in COLUMNS)
            lines.append(
                f"{estimate.strategy:<12}" + "".join(f"{number:>13.2f}" for number in numbers)
            )
    return lines if arguments.memory is None else [*lines, "", *_fits(estimates, arguments)]


def _fits(estimates: Sequence[MemoryEstimate], arguments: argparse.Namespace) -> list[str]:
    where = "GPU" if arguments.gpus else "host"
    lines = [f"with {arguments.memory / 2**30:.4g} GiB on each {where}:"]
    for estimate in estimates:
        found: MemoryBytes = estimate.rank if arguments.gpus else estimate.host
        taken = f"{found.total / 2**30:.4g} GiB"
        ranks, per_host = estimate.fewest_ranks, estimate.ranks_per_host
        if ranks == estimate.world:
            answer = f"fits ({taken})"
        elif ranks is not None:
            hosts = "" if arguments.gpus else f"{ranks // per_host} hosts of {per_host}; "
            answer = f"needs {ranks} ranks ({hosts}with {estimate.world}: {taken})"
        else:
            how = "" if arguments.gpus or per_host == 1 else f" of {per_host} ranks"
            answer = f"fits with no number of {where}s{how} (with {estimate.world}: {taken})"
        lines.append(f"{estimate.strategy:<12}{answer}")
    gathers = arguments.gpus or not arguments.host_params
    if (
        gathers
        and not arguments.unit
        and any(estimate.strategy == "fsdp" for estimate in estimates)
    ):
        lines.append("fsdp gathers the model as one unit: say with --unit how large the largest is")
    return lines
