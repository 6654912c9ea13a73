"""Trains one model under several strategies side by side, and compares speed, memory and losses.

    python benchmarks/compare.py                      # a GPT on Python's own sources, 3.5 minutes
    python benchmarks/compare.py --model mlp --strategies ddp,torch-ddp --steps 50 --json mlp.json

All strategies train the same model from the same weights on the same global batches. They take
turns of a few seconds; while one computes the processes of the others sleep. Prints a table and how
far the losses agree (exit code 1 if they do not), and writes plots and, with --json, every number.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure.agreement import Agreement, agreements
from measure.bad_input import BadInput, expect_positive, unknown_name
from measure.exit_codes import exit_code
from measure.job import Job, JobOptions, prepare, summaries_of, train
from measure.machine import cores, machine, warn_if_busy
from measure.progress import progress
from measure.results import write_results
from measure.rounds import WARM_UP_STEPS, Extent
from measure.stages import MODELS as CUT_MODELS
from measure.strategies import (
    OTHER_NAMES,
    STRATEGIES,
    OptimizerSpec,
    built,
    comparable,
    ready,
    require_trireme,
)
from measure.summary import Summary, reference_of
from measure.table import comparison
from workloads import NORMS, WORKLOADS

DEFAULT_STRATEGIES = "single,ddp,zero2,torch-ddp"
DEFAULT_BUDGET_S = 210.0
PLOTS_S = 6.0


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if losses differ, 2 for wrong options, 3 if a rank failed."""
    started = time.monotonic()
    arguments = _parser().parse_args(command_line)
    return exit_code(lambda: _compare(arguments, started))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="gpt", help=f"one of {', '.join(WORKLOADS)} (default: gpt)")
    add(
        "--strategies",
        default=DEFAULT_STRATEGIES,
        help=f"`all`, or some of {', '.join(comparable())}",
    )
    add("--ranks", type=int, default=2, help="ranks of the parallel strategies (default: 2)")
    add("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds in all (default: 210)")
    add("--steps", type=int, help="measured steps per strategy, in place of a time budget")
    add("--text", help="a file to train the GPT on (default: Python's standard library)")
    add("--norm", default="groupnorm", help=f"of resnet18: {' or '.join(NORMS)}")
    add("--seed", type=int, default=0, help="of weights and sample order (default: 0)")
    add("--out", type=Path, default=Path("build/compare"), help="folder of the plots")
    add("--json", type=Path, help="file for all numbers")
    add("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser


def _compare(arguments: argparse.Namespace, started: float) -> int:
    names = _strategy_names(arguments)
    on_machine = machine()
    with tempfile.TemporaryDirectory(prefix="compare") as scratch:
        job = _job(arguments, Path(scratch))
        _require_trireme(job, names)
        _announce(job, names)
        plots_s = PLOTS_S if _can_plot() else 0.0
        extent = Extent(arguments.steps, started + arguments.budget - plots_s)
        trajectories = train(job, names, extent, Path(scratch), progress(names))
    summaries = summaries_of(job, trajectories)
    proof = agreements({summary.strategy: summary.losses for summary in summaries})
    _print_results(job, summaries, proof)
    if arguments.json is not None:
        results = {"machine": on_machine, **_results(job, summaries, proof)}
        write_results(arguments.json, results)
        print(f"\nNumbers: {arguments.json}")
    _draw(job, summaries, arguments.out)
    return 0 if all(agreement.holds for agreement in proof) else 1


def _strategy_names(arguments: argparse.Namespace) -> list[str]:
    given = [name.strip() for name in arguments.strategies.split(",") if name.strip()]
    names = [OTHER_NAMES.get(name, name) for name in given]
    synchronized = arguments.norm == "syncbn"
    is_cut = arguments.model in CUT_MODELS
    if names == ["all"]:
        left_out = [n for n in ready() if synchronized and STRATEGIES[n].replicates]
        left_out += [n for n in ready() if not is_cut and STRATEGIES[n].is_staged]
        names = [n for n in ready() if n not in left_out]
    if not names or len(set(names)) != len(names):
        raise BadInput(
            "compare",
            f"got --strategies {arguments.strategies!r}, expected different names",
            f"Choose out of {', '.join(comparable())}, separated by commas.",
        )
    for name in names:
        if built("compare", name).replicates and synchronized:
            raise BadInput(
                "compare",
                f"got --norm syncbn with {name}, whose replicas normalize their own rows, "
                "expected strategies of ranks",
                "Leave it out.",
            )
        if STRATEGIES[name].is_staged and arguments.model in WORKLOADS and not is_cut:
            raise BadInput(
                "compare",
                f"got {name} with --model {arguments.model}, expected one that is cut into layers",
                f"Choose out of {', '.join(CUT_MODELS)}, or leave it out.",
            )
    return names


def _require_trireme(job: Job, names: Sequence[str]) -> None:
    needed = job.workload_options.norm == "syncbn" or any(
        STRATEGIES[n].needs_trireme for n in names
    )
    if needed:
        require_trireme("compare", "or choose --strategies single,torch-ddp.")


def _job(arguments: argparse.Namespace, scratch: Path) -> Job:
    """Checks the options that describe the training and prepares its data."""
    if arguments.model not in WORKLOADS:
        raise unknown_name("compare", "model", arguments.model, WORKLOADS)
    if arguments.norm not in NORMS:
        raise unknown_name("compare", "norm", arguments.norm, NORMS)
    expect_positive("compare", arguments, "ranks", "steps", "budget")
    learns_text = arguments.model.startswith("gpt")
    for option, fits in (("text", learns_text), ("norm", arguments.model == "resnet18")):
        if not fits and getattr(arguments, option) != _parser().get_default(option):
            raise BadInput(
                "compare",
                f"got --{option} with --model {arguments.model}, expected a model that uses it",
                "Leave the option out.",
            )
    options = JobOptions(
        arguments.ranks, arguments.seed, arguments.text, arguments.norm, arguments.tiny
    )
    return prepare(arguments.model, options, scratch)


def _announce(job: Job, names: Sequence[str]) -> None:
    print(
        f"{job.model} on {job.data}: {job.global_batch} {job.workload.unit} per step, "
        f"strategies {', '.join(names)}, {job.ranks} ranks, {cores()} cores",
        flush=True,
    )
    if job.ranks > cores():
        print("More ranks than cores: look at memory and losses, not at speed.", flush=True)
    warn_if_busy()


def _print_results(job: Job, summaries: list[Summary], proof: list[Agreement]) -> None:
    reference = reference_of([summary.strategy for summary in summaries])
    steps = len(summaries[0].losses)
    print(f"\n{steps} steps each, {WARM_UP_STEPS} of them warm-up:\n")
    print(comparison(summaries, reference, job.workload.unit))
    print(
        f"\nvs {reference}: ratio of the median step times, below 1 is faster."
        "\nexposed comm: from the last computed gradient to the end of backward, share of the step."
        "\nhost MiB: memory of all ranks, what they share counted once."
    )
    if proof:
        print("\nLosses, largest relative difference:")
    for agreement in proof:
        print(agreement.line())


def _results(job: Job, summaries: list[Summary], proof: list[Agreement]) -> dict[str, Any]:
    return {
        "job": {
            "model": job.model,
            "data": job.data,
            "global_batch": job.global_batch,
            "unit": job.workload.unit,
            "norm": job.workload_options.norm,
            "optimizer": str(OptimizerSpec()),
            "seed": job.seed,
            "warm_up_steps": WARM_UP_STEPS,
        },
        "runs": [s.to_json(STRATEGIES[s.strategy].options) for s in summaries],
        "agreement": [asdict(agreement) for agreement in proof],
    }


def _can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _draw(job: Job, summaries: list[Summary], folder: Path) -> None:
    if not _can_plot():
        print("\nNo plots: matplotlib is not installed (pip install matplotlib).")
        return
    from measure.plots import draw

    caption = f"{job.model}, {job.global_batch} {job.workload.unit} per step, {cores()} cores"
    for path in draw(summaries, caption, folder):
        print(f"Plot: {path}")


if __name__ == "__main__":
    sys.exit(main())
