"""The parameter server beside torch RPC, Gloo's messages, and torch's operators, on one host.

    python benchmarks/bench_ps.py --json benchmarks/results/ps.json
    python benchmarks/bench_ps.py --only sparse,updates --quick

messages (2 minutes): pull and push of a dense table beside RPC and Gloo. A push of ours applies SGD
before it returns; one of RPC and Gloo only moves the bytes. A pull of ours fills the parameters of
a module; "bound" is one under bsp, where these lie in the table (measure/ps_rounds.py).

sparse (1 minute): rows that one worker pulls and pushes, beside torch's index_select and index_add_
of as many bytes (measure/ps_rows.py).

updates (2 minutes): steps that 1, 2 and 4 workers make together, beside torch's tutorial on batch
RPC, whose server is one more process (measure/ps_updates.py).

model (3 minutes): a step of `mlp` under bsp beside one of our ZeRO 2.

stragglers (8 minutes): examples/python/ps_stragglers.py, 4 workers that sleep, 3 seeds.

cpp (1 minute): pull and push of 4 bytes in C++. Needs the target `ps_verbs`
(benchmarks/cpp/ps_verbs.cpp).

All sides of a part take turns in the same processes of one thread each, in alternating order.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from measure.bench_options import run_in_parts
from measure.cpp_ranks import run_cpp_ranks
from measure.fresh_run import RANKS, run_fresh
from measure.machine import cores
from measure.ps_rounds import PsCase, measure_ps
from measure.ps_rows import ADD, PULL, PUSH_ROWWISE, PUSH_SGD, SELECT, RowsCase, measure_rows
from measure.ps_updates import UpdatesCase, measure_updates
from measure.sides import PS_BSP, ZERO_2
from measure.stats import PairedRatio
from measure.step_runs import FULL, QUICK, Effort, Match, StepRuns
from measure.straggler_runs import BSP, StragglerCase, measure_stragglers
from measure.table import print_times, table

MIB = 1 << 20
SIZES = {"4 B": 4, "1 MiB": MIB, "25 MiB": 25 * MIB}
# Ours, beside whom, and how many times faster by size.
TARGETS = {
    "ours pull": ("rpc pull", {"4 B": 40, "1 MiB": 7, "25 MiB": 2.2}),
    "ours push": ("rpc push", {"4 B": 20, "1 MiB": 5, "25 MiB": 1.3}),
}
BOUND_US = 10  # a pull of a bound module takes at most so long
ROWS_TARGET = 2.0  # times as long as torch: half as many rows per second
ROWS_BESIDE = {PULL: SELECT, PUSH_SGD: ADD, PUSH_ROWWISE: ADD}
UPDATES_TARGETS = {"dense": 4, "sparse": 10}  # times as many updates as RPC
WORKERS = (1, 2, 4)
MODEL, MODEL_TARGET = "mlp", 1.5  # times ZeRO 2's step
# Times as many updates per second as under bsp.
STRAGGLER_TARGETS = {
    "always": {"bsp-backup-1": 2.7, "async": 2.8},
    "sometimes": {"bsp-backup-1": 1.15, "ssp-3": 1.4, "async": 1.6},
}
SEEDS = 3
CPP_TARGET_US = 1.5
CPP_WITH_TARGET = ("pull", "push")


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    return run_in_parts("bench_ps", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    results[FILED_AS.get(part, part)] = PARTS[part](QUICK if quick else FULL)
    return True


def bench_messages(effort: Effort) -> dict[str, Any]:
    """Measures and prints pulls and pushes of dense tables; returns its part of the JSON."""
    return {
        name: show(name, measure_ps(PsCase(size, effort.rounds))) for name, size in SIZES.items()
    }


def show(size: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Prints the times of a size in us, and returns them with the ratios to RPC."""
    ratios = {
        ours: PairedRatio.of(times[ours], times[theirs], 1 / factors[size])
        for ours, (theirs, factors) in TARGETS.items()
    }
    notes = {"ours pull, bound": f"target {BOUND_US} us"}
    for side, ratio in ratios.items():
        theirs, factors = TARGETS[side]
        notes[side] = f"{1 / ratio.median:.1f}x {theirs}, target {factors[size]}x: {ratio.verdict}"
    print_times(f"{size}, 2 processes on {cores()} cores", times, notes)
    return {
        "times_us": times,
        "ratios_to_rpc": {side: ratio.to_json() for side, ratio in ratios.items()},
    }


def bench_sparse(effort: Effort) -> dict[str, Any]:
    """Measures and prints rows per second on one core; returns its part of the JSON."""
    case = RowsCase(calls=5 * effort.steps, rounds=effort.rounds)
    times = measure_rows(case)
    ratios = {
        ours: PairedRatio.of(times[ours], times[theirs], ROWS_TARGET)
        for ours, theirs in ROWS_BESIDE.items()
    }
    notes = {
        ours: f"{1 / ratio.median:.0%} of {ROWS_BESIDE[ours]}'s rows/s, "
        f"target {1 / ROWS_TARGET:.0%}: {ratio.verdict}"
        for ours, ratio in ratios.items()
    }
    print_times(f"{case.ids} of {case.rows} rows x {case.dim}", times, notes)
    return {
        **{"rows": case.rows, "dim": case.dim, "ids": case.ids, "times_us": times},
        "ratios_to_torch": {side: ratio.to_json() for side, ratio in ratios.items()},
    }


def bench_updates(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints updates by all workers; returns its part of the JSON."""
    found = []
    for kind, target in UPDATES_TARGETS.items():
        for workers in WORKERS:
            case = UpdatesCase(kind, workers, calls=effort.steps, rounds=effort.rounds)
            times = measure_updates(case)
            ratio = PairedRatio.of(times["ours"], times["rpc"], 1 / target)
            note = f"{1 / ratio.median:.1f}x rpc, target {target}x: {ratio.verdict}"
            print_times(f"{kind}, W = {workers}", times, {"ours": note})
            per_s = {side: 1e6 / statistics.median(us) for side, us in times.items()}
            found.append(
                {
                    **{"kind": kind, "workers": workers, "times_us": times},
                    **{"updates_per_s": per_s, "ratio_to_rpc": ratio.to_json()},
                }
            )
    return found


def bench_model(effort: Effort) -> dict[str, Any]:
    """Measures and prints steps of a model; returns its part of the JSON."""
    runs = StepRuns(partial(run_fresh, workload=MODEL, steps=effort.steps))
    runs.add((PS_BSP, ZERO_2), 1)
    match = Match((PS_BSP,), (ZERO_2,), MODEL_TARGET)
    contests = runs.contests([match], (), effort.rounds)
    runs.print_with(contests)
    return {
        "workload": MODEL,
        "runs": runs.to_json(),
        "contests": [asdict(contest) for contest in contests],
    }


def bench_stragglers(effort: Effort) -> dict[str, Any]:
    """Measures and prints workers of unequal speed; returns its part of the JSON."""
    seconds = 1.0 if effort is QUICK else 12.0
    seeds = 1 if effort is QUICK else SEEDS
    case = StragglerCase(0, seconds)
    rates, reached = defaultdict[Any, list[float]](list), defaultdict[Any, list[Any]](list)
    for seed in range(seeds):
        for run in measure_stragglers(replace(case, seed=seed)):
            rates[run.pattern, run.mode].append(run.updates_per_s)
            reached[run.pattern, run.mode].append(run.seconds_to_good)
    rows = [
        {
            **{"pattern": pattern, "mode": mode, "updates_per_s": found},
            "seconds_to_good": reached[pattern, mode],
            "ratio_to_bsp": PairedRatio.of(
                rates[pattern, BSP], found, 1 / STRAGGLER_TARGETS[pattern].get(mode, 1.0)
            ).to_json(),
            "target": STRAGGLER_TARGETS[pattern].get(mode),
        }
        for (pattern, mode), found in rates.items()
    ]
    _print_stragglers(rows)
    return {**asdict(case), "seeds": seeds, "modes": rows}


def _print_stragglers(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = []
    for row in rows:
        reached = [seconds for seconds in row["seconds_to_good"] if seconds is not None]
        target = f"{row['target']}x: {row['ratio_to_bsp']['verdict']}" if row["target"] else ""
        cells.append(
            [
                f"{row['pattern']}, {row['mode']}",
                f"{statistics.median(row['updates_per_s']):.1f}",
                f"{1 / row['ratio_to_bsp']['median']:.2f}x",
                target,
                f"{statistics.median(reached):.1f}" if reached else "-",
                f"{len(reached)} of {len(row['seconds_to_good'])}",
            ]
        )
    header = ["", "updates/s", "of bsp's", "target", "s to 95 %", "reached"]
    print(table(header, cells), "\n", flush=True)


def bench_cpp(effort: Effort) -> dict[str, Any]:
    """Measures and prints verbs in C++; returns its part of the JSON."""
    times = json.loads(run_program(effort.rounds))
    ratios = {
        name: PairedRatio.of(times[name], [1.0] * len(times[name]), CPP_TARGET_US)
        for name in CPP_WITH_TARGET
    }
    notes = {name: f"target {CPP_TARGET_US} us: {ratio.verdict}" for name, ratio in ratios.items()}
    print_times("4 B, C++", times, notes)
    verdicts = {name: ratio.verdict for name, ratio in ratios.items()}
    return {"times_us": times, "target_us": CPP_TARGET_US, "verdicts": verdicts}


def run_program(rounds: int, calls: int = 20000) -> str:
    """What rank 0 of benchmarks/cpp/ps_verbs.cpp prints."""
    return run_cpp_ranks("bench_ps", "ps_verbs", [str(rounds), str(calls)], RANKS)


PARTS: dict[str, Callable[[Effort], Any]] = {
    "messages": bench_messages,
    "sparse": bench_sparse,
    "updates": bench_updates,
    "model": bench_model,
    "stragglers": bench_stragglers,
    "cpp": bench_cpp,
}
FILED_AS = {"messages": "sizes"}


if __name__ == "__main__":
    sys.exit(main())
