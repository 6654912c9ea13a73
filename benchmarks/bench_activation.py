"""What checkpoints and offload cost, and what they leave in memory, beside torch's and by hand.

    python benchmarks/bench_activation.py --json benchmarks/results/activation.json
    python benchmarks/bench_activation.py --only peak --quick

call (1 minute): a checkpoint of Linear(8, 8), forward and backward, beyond its plain step and a
second forward, ours beside torch's (use_reentrant=False); and how many Python functions each calls.

steps (3 minutes): forward and backward of `gpt` with each block in a checkpoint, ours beside
torch's, in proportion to the plain step.

cpp (4 minutes): `mlp` and `gpt` in C++, every block in a checkpoint, beside plain steps that run
each block once more by hand. Needs the target `checkpoint` (benchmarks/cpp/checkpoint.cpp).

offload (3 minutes): `gpt` with what its blocks save in the memory of the host, or in a folder,
beside the longer of a plain step and a copy of as many bytes into a mapped file there and back.

peak (3 minutes): the most that a step of `gpt` with 24 blocks holds of activations without
checkpoints, in segments, and at half the budget, beside what was planned.

Sides take turns within a process, odd rounds reversed. A target is met when the median of the
paired ratios is at or below it; peaks are to be within a tenth of the plan.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure.activation_runs import (
    OFFLOADS,
    measure_calls,
    measure_offload,
    measure_peak,
    measure_steps,
)
from measure.bad_input import BadInput
from measure.bench_options import run_in_parts
from measure.machine import cores
from measure.stats import PairedRatio
from measure.table import table

CALL_TARGET = 0.2
STEPS_TARGET = 1.0
CPP_TARGET = 1.03
OFFLOAD_TARGET = 1.15
PEAK_TOLERANCE = 0.1
PEAKS = ("never", "sqrt", "auto")
STEPS = {"plain": "no checkpoint", "ours": "trireme", "torch": "torch"}  # labels, by side


@dataclass(frozen=True)
class Effort:
    """How much is measured. A quick run is for looking, not for judging."""

    processes: int
    rounds: int
    blocks: int
    tiny: bool


FULL = Effort(processes=3, rounds=5, blocks=30, tiny=False)
QUICK = Effort(processes=2, rounds=2, blocks=2, tiny=True)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a run failed."""
    return run_in_parts("bench_activation", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    results[part] = PARTS[part](QUICK if quick else FULL)
    return True


def bench_call(effort: Effort) -> dict[str, Any]:
    """Measures and prints what a small checkpoint adds; returns its part of the JSON."""
    runs = [measure_calls(effort.blocks) for _ in range(effort.processes * effort.rounds)]
    ours = [run.added(run.ours) for run in runs]
    torchs = [run.added(run.torchs) for run in runs]
    ratio = PairedRatio.of(ours, torchs, CALL_TARGET)
    added = {"trireme": statistics.median(ours), "torch": statistics.median(torchs)}
    calls = {"trireme": runs[0].python_calls, "torch": runs[0].torchs_python_calls}
    print(
        table(
            ["checkpoint of Linear(8, 8)", "adds us", "Python calls"],
            [[name, f"{added[name]:.1f}", str(calls[name])] for name in added],
        )
    )
    _print("added, trireme / torch", ratio)
    return {
        "rows": [{"label": name, "added_us": added[name], "calls": calls[name]} for name in added],
        "ratio": asdict(ratio),
        "runs": [asdict(run) for run in runs],
    }


def bench_steps(effort: Effort) -> dict[str, Any]:
    """Measures and prints checkpointed steps of `gpt`; returns its part of the JSON."""
    runs = [measure_steps("gpt", effort.rounds, effort.tiny) for _ in range(effort.processes)]
    times = {name: [ms for run in runs for ms in run[name]] for name in runs[0]}
    plain = statistics.median(times["plain"])
    rows = [
        {
            "label": STEPS[name],
            "step_ms": statistics.median(taken),
            "beside_plain": statistics.median(taken) / plain,
        }
        for name, taken in times.items()
    ]
    print(
        table(
            ["gpt, each block checkpointed", "step ms", "of a plain step"],
            [[r["label"], f"{r['step_ms']:.1f}", f"{r['beside_plain']:.3f}"] for r in rows],
        )
    )
    ratio = PairedRatio.of(times["ours"], times["torch"], STEPS_TARGET)
    _print("step, trireme / torch", ratio)
    return {"rows": rows, "ratio": asdict(ratio), "times_ms": times}


def bench_cpp(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints checkpoints in C++; returns its part of the JSON."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(effort.processes):
        for line in run_program(effort.rounds, effort.tiny).splitlines():
            run = json.loads(line)
            times = found.setdefault(run.pop("model"), {name: [] for name in run})
            for name, taken in run.items():
                times[name] += taken
    rows = []
    for model, times in found.items():
        medians = {f"{name}_ms": statistics.median(taken) for name, taken in times.items()}
        ratio = PairedRatio.of(times["checkpointed"], times["twice"], CPP_TARGET)
        rows.append({"model": model, **medians, "ratio": asdict(ratio), "times_ms": times})
        print(f"{model}: " + ", ".join(f"{name} {ms:.1f}" for name, ms in medians.items()))
        _print("checkpointed / a second forward by hand", ratio)
    return rows


def run_program(rounds: int, tiny: bool) -> str:
    """What benchmarks/cpp/checkpoint.cpp prints, built beside the package."""
    import trireme

    program = Path(trireme.__file__).absolute().parents[2] / "benchmarks" / "cpp" / "checkpoint"
    if not program.exists():
        raise BadInput(
            "bench_activation", f"got no program {program}", "Build the target checkpoint."
        )
    command = [str(program), str(rounds), *(["tiny"] if tiny else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores())}
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout


def bench_offload(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints offload; returns its part of the JSON."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        runs = [
            measure_offload(Path(folder), effort.rounds, effort.tiny)
            for _ in range(effort.processes)
        ]
    rows = []
    for where in OFFLOADS:
        steps = [ms for run in runs for ms in run.steps[where]]
        plain = [ms for run in runs for ms in run.steps["plain"]]
        copies = [ms for run in runs for ms in run.copies[where]]
        longer = [max(pair) for pair in zip(plain, copies, strict=True)]
        ratio = PairedRatio.of(steps, longer, OFFLOAD_TARGET)
        row = {
            "where": where,
            "mib": runs[0].bytes[where] / 2**20,
            "step_ms": statistics.median(steps),
            "plain_ms": statistics.median(plain),
            "copy_ms": statistics.median(copies),
        }
        rows.append({**row, "ratio": asdict(ratio)})
        print(", ".join(f"{k} {v if isinstance(v, str) else f'{v:.1f}'}" for k, v in row.items()))
        _print("step / the longer of plain step and copy", ratio)
    return rows


def bench_peak(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints peaks beside what was planned; returns its part of the JSON."""
    rows = []
    for checkpoint in PEAKS:
        runs = [measure_peak(checkpoint, effort.tiny) for _ in range(effort.processes)]
        measured = statistics.median(run.measured for run in runs)
        planned = runs[0].planned
        share = measured / planned
        rows.append(
            {
                "checkpoint": checkpoint,
                "measured_mib": measured,
                "planned_mib": planned,
                "share": share,
                "verdict": "met" if abs(share - 1) <= PEAK_TOLERANCE else "missed",
                "runs": [asdict(run) for run in runs],
            }
        )
    print(
        table(
            ["gpt, 24 blocks", "MiB at most", "planned", "share", "within 10 %"],
            [
                [
                    row["checkpoint"],
                    *(f"{row[name]:.1f}" for name in ("measured_mib", "planned_mib")),
                    f"{row['share']:.3f}",
                    row["verdict"],
                ]
                for row in rows
            ],
        ),
        "\n",
        flush=True,
    )
    return rows


def _print(what: str, ratio: PairedRatio) -> None:
    print(f"{what}:")
    print("\n".join("  " + line for line in ratio.lines()), "\n", flush=True)


PARTS: Mapping[str, Callable[[Effort], Any]] = {
    "call": bench_call,
    "steps": bench_steps,
    "cpp": bench_cpp,
    "offload": bench_offload,
    "peak": bench_peak,
}


if __name__ == "__main__":
    sys.exit(main())
