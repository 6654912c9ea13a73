"""The first look: two small models, each trained in seven ways, side by side, in three minutes.

    python benchmarks/demo.py          # what `make demo` runs

One process, then DataParallel, DDP, ZeRO 2 and fully_shard of Trireme, then torch's DDP and FSDP2.
All train the same model from the same weights on the same global batches with the same AdamW, take
turns of a few seconds, and are timed after a warm-up. Draws one picture of time and memory, writes
all numbers beside it, and ends with a sentence for each model. `compare.py` is the long version.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from measure.agreement import Agreement, agreements
from measure.bad_input import expect_positive
from measure.exit_codes import exit_code
from measure.job import Job, JobOptions, prepare, summaries_of, train
from measure.machine import cores, machine, warn_if_busy
from measure.progress import Countdown
from measure.results import write_results
from measure.rounds import WARM_UP_STEPS, Extent
from measure.strategies import STRATEGIES, OptimizerSpec, require_trireme
from measure.summary import Summary
from measure.table import comparison
from measure.verdict import sentence

MODELS = ("mlp", "gpt-small-batch")
STRATEGY_NAMES = ("single", "dp", "ddp", "zero2", "fsdp", "torch-ddp", "torch-fsdp2")
REFERENCE = "torch-ddp"
BUDGET_S = 165.0
ENOUGH_STEPS = 10  # for a median
END_S = 5.0  # the ranks' last step and end, and the picture


@dataclass(frozen=True)
class Outcome:
    """One model's runs, and the proof that they trained the same."""

    job: Job
    summaries: list[Summary]
    proof: list[Agreement]


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if losses differ, 2 for wrong options, 3 if a rank failed."""
    arguments = _parser().parse_args(command_line)
    return exit_code(lambda: _show(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", type=float, default=BUDGET_S, help=f"seconds in all (default: {BUDGET_S:.0f})")
    add("--steps", type=int, help="measured steps per strategy, in place of a time budget")
    add("--out", type=Path, default=Path("build/demo"), help="folder of the picture and numbers")
    add("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser


def _show(arguments: argparse.Namespace) -> int:
    expect_positive("demo", arguments, "steps", "budget")
    require_trireme("demo", "or say `make demo`.")
    on_machine = machine()
    _announce(arguments.budget)
    outcomes = _train_all(arguments)
    for outcome in outcomes.values():
        _print_outcome(outcome)
    numbers = {
        "machine": on_machine,
        "optimizer": str(OptimizerSpec()),
        "warm_up_steps": WARM_UP_STEPS,
        "models": {model: _numbers(outcome) for model, outcome in outcomes.items()},
    }
    write_results(arguments.out / "demo.json", numbers)
    print(f"\nNumbers: {arguments.out / 'demo.json'}")
    _draw(outcomes, arguments.out / "demo.png")
    print()
    fewest = min(len(o.summaries[0].losses) for o in outcomes.values()) - WARM_UP_STEPS
    if fewest < ENOUGH_STEPS:
        print(f"Take this with care: {fewest} steps were measured, --budget gives more time.")
    for model, outcome in outcomes.items():
        print(sentence(model, outcome.summaries))
    return 0 if all(a.holds for outcome in outcomes.values() for a in outcome.proof) else 1


def _announce(budget_s: float) -> None:
    print(
        f"Training {' and '.join(MODELS)} in {len(STRATEGY_NAMES)} ways each, side by side on "
        f"{cores()} cores: {budget_s / 60:.0f} minutes.\n"
        f"  {', '.join(STRATEGY_NAMES)}; 2 ranks of 1 thread, `single` with all cores",
        flush=True,
    )
    warn_if_busy()


def _train_all(arguments: argparse.Namespace) -> dict[str, Outcome]:
    """One model after the other, each with an equal part of the time that is left."""
    ends = time.monotonic() + arguments.budget
    countdown = Countdown(arguments.budget)
    processes = sum(STRATEGIES[name].processes(JobOptions.ranks)[0] for name in STRATEGY_NAMES)
    outcomes = {}
    try:
        for number, model in enumerate(MODELS):
            countdown.begin(model, f"starting {processes} processes")
            left = ends - time.monotonic()
            deadline = time.monotonic() + left / (len(MODELS) - number) - END_S
            with tempfile.TemporaryDirectory(prefix="demo") as scratch:
                job = prepare(model, JobOptions(tiny=arguments.tiny), Path(scratch))
                extent = Extent(arguments.steps, deadline)
                runs = train(job, STRATEGY_NAMES, extent, Path(scratch), countdown)
            summaries = summaries_of(job, runs)
            losses = {summary.strategy: summary.losses for summary in summaries}
            outcomes[model] = Outcome(job, summaries, agreements(losses))
    finally:
        countdown.end()
    return outcomes


def _print_outcome(outcome: Outcome) -> None:
    job, proof = outcome.job, outcome.proof
    steps = len(outcome.summaries[0].losses)
    print(
        f"\n{job.model}: {job.global_batch} {job.workload.unit} per step, {steps} steps each, "
        f"{WARM_UP_STEPS} of them warm-up\n"
    )
    print(comparison(outcome.summaries, REFERENCE, job.workload.unit))
    if all(agreement.holds for agreement in proof):
        apart = max(agreement.first for agreement in proof)
        print(f"\nThe losses of all agree: they are {apart:.0e} apart at most in the first steps.")
        return
    print()
    for agreement in proof:
        print(agreement.line())


def _numbers(outcome: Outcome) -> dict[str, object]:
    return {
        "global_batch": outcome.job.global_batch,
        "unit": outcome.job.workload.unit,
        "data": outcome.job.data,
        "seed": outcome.job.seed,
        "runs": [s.to_json(STRATEGIES[s.strategy].options) for s in outcome.summaries],
        "agreement": [asdict(agreement) for agreement in outcome.proof],
    }


def _draw(outcomes: Mapping[str, Outcome], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: matplotlib is not installed (pip install matplotlib).")
        return
    from measure.demo_picture import draw_demo

    titles = {
        model: f"{model}: {outcome.job.global_batch} {outcome.job.workload.unit} per step"
        for model, outcome in outcomes.items()
    }
    on = machine()
    caption = f"{cores()} cores of {on['cpu']}, torch {on['torch']}, AdamW, fp32"
    jobs = {model: outcome.summaries for model, outcome in outcomes.items()}
    draw_demo(jobs, titles, caption, path)
    print(f"Picture: {path}")


if __name__ == "__main__":
    sys.exit(main())
