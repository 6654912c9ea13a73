"""``plan --pipeline``: what each rank of a pipeline takes, and how long it computes nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Literal

import torch

from trireme import PipelineSchedule, pipeline_schedule
from trireme._core.errors import Area
from trireme.cli.counted_activations import make_model, make_sample
from trireme.cli.table import COLUMNS, dtype_of, unit_for
from trireme.pipeline_estimate import PipelineEstimate, RankOfPipeline, estimate_pipeline

refuse = Area("plan").refuse

# The parsed arguments have these names, and these values unless given.
_OWN = {"micro_batches": None, "schedule": "1f1b", "stages_per_rank": None, "balance": None}
_OTHERS = {
    "numel": None,
    "world": None,
    "strategy": ["all"],
    "ranks_per_host": None,
    "memory": None,
    "gpus": False,
    "host_params": True,
    "unit": 0,
    "dtype": None,
    "activations": None,
    "budget": None,
    "paper": False,
}
_OPTIONS = {"host_params": "--no-host-params"}


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """The options of it."""
    add = parser.add_argument_group(
        "pipelines", "a torch.nn.Sequential cut into stages; --input is that of a micro-batch"
    ).add_argument
    add("--pipeline", metavar="P", type=int, help="ranks of a pipeline, in place of --world")
    add("--micro-batches", metavar="M", type=int, help="of a step (default: 2 per rank)")
    add("--schedule", default=_OWN["schedule"], help="by its name (default: 1f1b)")
    add("--stages-per-rank", metavar="V", type=int, help="where the schedule leaves a choice")
    add(
        "--balance",
        help="layers per stage, as in 4,2,2; or what is balanced: bytes, or time, which runs the "
        "layers on the CPU (default: as many layers in each stage)",
    )


def expect_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that go not together."""
    is_pipeline = arguments.pipeline is not None
    for name, default in (_OTHERS if is_pipeline else _OWN).items():
        if getattr(arguments, name) == default:
            continue
        option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
        if is_pipeline:
            refuse(f"got {option} with --pipeline, expected one of them", "Leave one out.")
        refuse(f"got {option} without --pipeline, expected both", "Say --pipeline 4.")
    if is_pipeline and arguments.checkpoint == "sqrt":
        got = "got --checkpoint sqrt with --pipeline, which recomputes whole stages"
        refuse(got, "Say never, except_last, always or auto.")
    if not is_pipeline and arguments.world is None:
        refuse("got no --world, expected a number of ranks", "Say for example --world 4.")
    if is_pipeline and (
        len(arguments.input) > 1 or bool(arguments.input) == bool(arguments.sample)
    ):
        got = "got --pipeline, expected --model with it, and either --sample or one --input"
        refuse(got, "Say for example --model my_models:make_gpt --input 8,128:int64.")


def plan_pipeline(arguments: argparse.Namespace) -> str:
    """Returns the table, or JSON."""
    is_timed = arguments.balance == "time"
    mode: AbstractContextManager[Any] = nullcontext() if is_timed else torch.device("meta")
    ranks, micro_batches = arguments.pipeline, arguments.micro_batches
    schedule = pipeline_schedule(
        arguments.schedule,
        ranks=ranks,
        micro_batches=2 * ranks if micro_batches is None else micro_batches,
        stages_per_rank=arguments.stages_per_rank,
    ).with_recomputation(arguments.checkpoint or "never")
    balance = _balance(arguments.balance)
    module = make_model(arguments.model, mode, "" if is_timed else " on the meta device")
    sample = make_sample(arguments, mode)
    if arguments.input:
        (sample,) = sample
    try:
        found = estimate_pipeline(
            module,
            sample,
            schedule,
            balance=balance,
            optimizer=arguments.optimizer,
            grad_dtype=dtype_of(arguments.grad_dtype),
        )
    except (RuntimeError, NotImplementedError) as error:
        refuse(
            f"a layer raised {type(error).__name__}: {error}, expected it to run",
            "Say with --input or --sample what the first layer takes.",
        )
    if arguments.json:
        return json.dumps(_as_dict(arguments.schedule, schedule, found), indent=2)
    how = "by times measured here" if is_timed else "if all stages take as long"
    return "\n".join(
        [
            f"{found.numel:,} parameters in {found.layers} layers, {schedule.stages} stages on "
            f"{schedule.ranks} ranks; {schedule.micro_batches} micro-batches; "
            f"{arguments.optimizer}",
            f"{arguments.schedule}: bubble {found.bubble:.2f}, {how}",
            "",
            *_rows(found.ranks),
        ]
    )


def _balance(text: str | None) -> list[int] | Literal["bytes", "time"] | None:
    if text is None:
        return None
    if text in ("bytes", "time"):
        return "bytes" if text == "bytes" else "time"
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        got = f"got --balance {text}, expected layers per stage, bytes or time"
        refuse(got, "Say for example --balance 4,2,2.")


def _rows(ranks: Sequence[RankOfPipeline]) -> list[str]:
    scale, unit = unit_for(max(rank.taken.total for rank in ranks))
    layers = [", ".join(str(stage) for stage in rank.stages) for rank in ranks]
    width = max(map(len, layers)) + 2
    columns = "".join(f"{column:>13}" for column in COLUMNS)
    lines = [f"{unit} per rank".ljust(12) + " " * width + f"live{columns}       bubble"]
    for rank, text in zip(ranks, layers, strict=True):
        numbers = "".join(f"{getattr(rank.taken, column) / scale:>13.2f}" for column in COLUMNS)
        lines.append(
            f"{rank.rank:<12}{text:<{width}}{rank.micro_batches:>4}{numbers}{rank.bubble:>13.2f}"
        )
    return lines


def _as_dict(name: str, schedule: PipelineSchedule, found: PipelineEstimate) -> dict[str, Any]:
    made = asdict(found)
    for row, rank in zip(made["ranks"], found.ranks, strict=True):
        row["taken"] |= {"model_states": rank.taken.model_states, "total": rank.taken.total}
    numbers = {"stages": schedule.stages, "micro_batches": schedule.micro_batches}
    return {"schedule": name, **numbers, **made}
