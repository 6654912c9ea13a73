"""What pipelines over ranks cost, beside torch.distributed.pipelining and one process.

    python benchmarks/bench_pipeline.py --json benchmarks/results/pipeline.json
    python benchmarks/bench_pipeline.py --only small --quick

engine (half a minute): layers of Linear(8, 8) on one rank, 32 micro-batches: what an action takes
beyond the bare arithmetic, which a loop of Python does.

small (half a minute): the same layers on 2 ranks.

steps (5 minutes): `mlp`, `gpt-small-batch` and `gpt`, cut between their blocks.

threads (3 minutes): pipelines in one process, a stage on each of two threads, beside torchgpipe
with as many partitions, which computes all of them in one thread: alone, and with two threads in
its operators; and beside 2 ranks. It needs `pip install --no-deps torchgpipe`.

messages (1 minute): one way between two ranks, beside Gloo's send and recv, and beside one copy.

Ours is over shared memory, torch's over Gloo, on the same schedule, models and micro-batches; ranks
have one thread each. One process with one and with two threads runs the same micro-batches. All
sides live in the same processes and take turns, odd rounds reversed; a step takes as long as its
slowest rank. A target is met when the median of the paired ratios is at or below it.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from measure.bad_input import BadInput
from measure.bench_options import run_in_parts
from measure.pipeline_runs import (
    StepTimes,
    Times,
    job_of,
    measure_messages,
    measure_steps,
    measure_threads,
)
from measure.stats import PairedRatio
from measure.table import table

RANKS = 2
ENGINE_TARGET = 0.25
# What ours / torch shall be at most, by workload and schedule.
TARGETS = {
    "linear": {"1f1b": 0.12, "interleaved-1f1b": 0.12, "zb-v": 0.12},
    "mlp": {"1f1b": 0.75, "zb-v": 0.5},
    "gpt-small-batch": {"1f1b": 0.75, "interleaved-1f1b": 0.6, "zb-v": 0.5},
    "gpt": {"1f1b": 1.0, "zb-v": 0.95},
}
SPLIT_TARGET = 1.05  # ours with zb-v beside ours with 1f1b, of `mlp` and `gpt`
BUBBLE_TOLERANCE = 0.03
THREAD_TARGET = 0.65  # `gpt` in one process beside torchgpipe
THREAD_ENGINE_TARGET = 0.5  # what an action costs there, of layers of Linear(8, 8)
RANKS_TARGET = 1.05  # a pipeline on threads beside the same on ranks
MESSAGES = {64 << 10: 0.25, 1 << 20: 0.12, 25 << 20: 0.35}  # targets by bytes
COPY_TARGET = 1.6
COPIES_FROM = 1 << 20  # bytes


@dataclass(frozen=True)
class Effort:
    """How much is measured. A quick run is for looking, not for judging."""

    processes: int
    rounds: int
    short_rounds: int
    tiny: bool


FULL = Effort(processes=3, rounds=9, short_rounds=50, tiny=False)
QUICK = Effort(processes=1, rounds=2, short_rounds=3, tiny=True)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a run failed."""
    return run_in_parts("bench_pipeline", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    results[part] = PARTS[part](QUICK if quick else FULL)
    return True


def bench_engine(effort: Effort) -> dict[str, Any]:
    """Measures and prints what an action costs on one rank; returns its part of the JSON."""
    runs = [
        measure_steps("linear", ["gpipe"], 1, effort.short_rounds) for _ in range(effort.processes)
    ]
    times = _together(runs)
    actions = 2 * runs[0].chunks
    found = _beyond_bare(times, {"ours": "ours gpipe", "torch": "torch gpipe"}, actions)
    share = found["ours"] / found["torch"]
    rows = [
        {"label": label, "us": 1e3 * statistics.median(times[side]) / actions, "added_us": us}
        for label, side, us in (
            ("bare arithmetic", "1 thread", 0.0),
            ("trireme", "ours gpipe", found["ours"]),
            ("torch", "torch gpipe", found["torch"]),
        )
    ]
    verdict = "met" if share <= ENGINE_TARGET else "missed"
    _print_rows("F or B on one rank", rows, {"us": "us", "beyond bare": "added_us"})
    print(f"beyond bare, trireme / torch: {share:.3f}, target {ENGINE_TARGET}: {verdict}\n")
    return {"rows": rows, "share": share, "target": ENGINE_TARGET, "verdict": verdict}


def bench_small(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints steps of little arithmetic; returns their part of the JSON."""
    return _steps_of("linear", effort.short_rounds, effort, list(TARGETS["linear"]))["rows"]


def bench_steps(effort: Effort) -> dict[str, Any]:
    """Measures and prints steps of the workloads; returns their part of the JSON."""
    found: dict[str, Any] = {"rows": [], "splits": [], "bubbles": []}
    for workload in ("mlp", "gpt-small-batch", "gpt"):
        # Models of tests have two blocks: one for each of two stages.
        names = ["1f1b"] if effort.tiny else list(TARGETS[workload])
        for part, rows in _steps_of(workload, effort.rounds, effort, names).items():
            found[part] += rows
    return found


def bench_messages(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints messages; returns their part of the JSON."""
    rows = []
    for size, target in MESSAGES.items():
        runs = [measure_messages(size, effort.rounds) for _ in range(effort.processes)]
        times = {side: [us for run in runs for us in run[side]] for side in runs[0]}
        row: dict[str, Any] = {"kib": size >> 10}
        row |= {f"{side}_us": statistics.median(taken) for side, taken in times.items()}
        row["ratio"] = asdict(PairedRatio.of(times["ours"], times["torch"], target))
        copies = PairedRatio.of(times["ours"], times["copy"], COPY_TARGET)
        row["copies"] = asdict(copies) if size >= COPIES_FROM else None
        rows.append(row)
        print(f"{size >> 10} KiB: " + ", ".join(f"{k} {row[f'{k}_us']:.1f} us" for k in times))
        _print("message, trireme / torch", row["ratio"])
        if size >= COPIES_FROM:
            _print("message / copy", row["copies"])
    return rows


def bench_threads(effort: Effort) -> dict[str, Any]:
    """Measures and prints pipelines in one process; returns their part of the JSON."""
    if importlib.util.find_spec("torchgpipe") is None:
        raise BadInput(
            "bench_pipeline",
            "got no package torchgpipe, expected it beside ours",
            "Install it (pip install --no-deps torchgpipe), or choose other parts with --only.",
        )
    found: dict[str, Any] = {"engine": _thread_engine(effort), "rows": []}
    for workload in ("mlp", "gpt"):
        times = _thread_times(workload, effort.rounds, effort)
        row: dict[str, Any] = {"workload": workload}
        row["ms"] = {side: statistics.median(taken) for side, taken in times.items()}
        for name, ours, others, target in (
            ("step", "step", "torchgpipe, 1 thread", THREAD_TARGET),
            ("pass", "pass", "torchgpipe, 1 thread", THREAD_TARGET),
            ("fastest", "pass", _faster_torchgpipe(times), 1.0),
            ("ranks", "step", "ranks", RANKS_TARGET),
        ):
            row[name] = asdict(PairedRatio.of(times[ours], times[others], target))
        found["rows"].append(row)
        _print_rows(workload, _labelled(row["ms"]), {"step ms": "ms"})
        _print("step() / torchgpipe", row["step"])
        _print("pipe(x), backward() / torchgpipe", row["pass"])
        _print("the same / torchgpipe with the threads that suit it", row["fastest"])
        _print("step() on threads / on ranks", row["ranks"])
    return found


def _thread_engine(effort: Effort) -> dict[str, Any]:
    times = _thread_times("linear", effort.short_rounds, effort)
    sides = {"step": "step", "pass": "pass", "torchgpipe": _faster_torchgpipe(times)}
    actions = 2 * RANKS * job_of("linear", tiny=False).chunks
    added = _beyond_bare(times, sides, actions)
    share = added["pass"] / added["torchgpipe"]
    verdict = "met" if share <= THREAD_ENGINE_TARGET else "missed"
    rows = [{"label": side, "added_us": us} for side, us in added.items()]
    _print_rows("F or B of a stage in one process", rows, {"beyond bare, us": "added_us"})
    print(f"pass / torchgpipe: {share:.3f}, target {THREAD_ENGINE_TARGET}: {verdict}\n")
    return {"rows": rows, "share": share, "target": THREAD_ENGINE_TARGET, "verdict": verdict}


def _beyond_bare(times: Times, sides: Mapping[str, str], actions: int) -> dict[str, float]:
    """Returns what an action takes beyond the bare arithmetic, in us, by side: each of ``sides``
    has its label in ``times``."""
    bare = times["1 thread"]
    return {
        side: statistics.median(
            1e3 * (ms - alone) / actions for ms, alone in zip(times[label], bare, strict=True)
        )
        for side, label in sides.items()
    }


def _thread_times(workload: str, rounds: int, effort: Effort) -> Times:
    runs = [measure_threads(workload, rounds, effort.tiny) for _ in range(effort.processes)]
    return {side: [ms for run in runs for ms in run[side]] for side in runs[0]}


def _faster_torchgpipe(times: Times) -> str:
    sides = [side for side in times if side.startswith("torchgpipe")]
    return min(sides, key=lambda side: statistics.median(times[side]))


def _labelled(times: dict[str, float]) -> list[dict[str, Any]]:
    return [{"label": side, "ms": ms} for side, ms in times.items()]


PARTS = {
    "engine": bench_engine,
    "small": bench_small,
    "steps": bench_steps,
    "threads": bench_threads,
    "messages": bench_messages,
}


def _steps_of(
    workload: str, rounds: int, effort: Effort, names: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    runs = [
        measure_steps(workload, names, RANKS, rounds, effort.tiny) for _ in range(effort.processes)
    ]
    times = _together(runs)
    medians = {side: statistics.median(taken) for side, taken in times.items()}
    rows, bubbles, splits = [], [], []
    for name in names:
        ratio = PairedRatio.of(
            times[f"ours {name}"], times[f"torch {name}"], TARGETS[workload][name]
        )
        rows.append(
            {
                "workload": workload,
                "schedule": name,
                "ours_ms": medians[f"ours {name}"],
                "torch_ms": medians[f"torch {name}"],
                "one_thread_ms": medians["1 thread"],
                "two_threads_ms": medians["2 threads"],
                "live": runs[0].live[name],
                "ratio": asdict(ratio),
            }
        )
        measured, computed = (
            statistics.median(run.bubbles[name][i] for run in runs) for i in (0, 1)
        )
        apart = abs(measured - computed)
        bubbles.append(
            {
                "workload": workload,
                "schedule": name,
                "measured": measured,
                "computed": computed,
                "verdict": "met" if apart <= BUBBLE_TOLERANCE else "missed",
            }
        )
    _print_rows(workload, _labelled(medians), {"step ms": "ms"})
    for row, bubble in zip(rows, bubbles, strict=True):
        _print(f"{row['schedule']}, trireme / torch", row["ratio"])
        print(f"  bubble {bubble['measured']:.3f}, computed {bubble['computed']:.3f}")
    if {"zb-v", "1f1b"} <= set(names) and workload in ("mlp", "gpt"):
        split = PairedRatio.of(times["ours zb-v"], times["ours 1f1b"], SPLIT_TARGET)
        splits.append({"workload": workload, "ratio": asdict(split)})
        _print("zb-v / 1f1b of trireme", splits[0]["ratio"])
    return {"rows": rows, "splits": splits, "bubbles": bubbles}


def _together(runs: Sequence[StepTimes]) -> Times:
    return {side: [ms for run in runs for ms in run.times[side]] for side in runs[0].times}


def _print_rows(title: str, rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> None:
    cells = [[row["label"], *(f"{row[key]:.2f}" for key in columns.values())] for row in rows]
    print(table([title, *columns], cells))


def _print(title: str, ratio: dict[str, Any]) -> None:
    low, high = ratio["quartiles"]
    print(
        f"{title}: {ratio['median']:.3f} ({low:.3f} to {high:.3f}), "
        f"target {ratio['target']:g}: {ratio['verdict']}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
