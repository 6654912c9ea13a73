"""Gradient compression: what codes cost on one core, and steps over Gloo beside torch's hooks.

    python benchmarks/bench_compression.py --json benchmarks/results/compression.json
    python benchmarks/bench_compression.py --only steps --quick

codes (10 seconds): to code 16.8 M fp32 gradients, what is kept of them included, beside an in-place
multiplication of as many, in turns. Bytes moved count a gradient, what was kept, what is kept and
the code; the pass reads and writes a gradient. Needs the target `block_codes`
(benchmarks/cpp/block_codes.cpp).

steps (25 minutes): `mlp` over Gloo on this machine, 2 ranks of one thread, between="ranks", beside
torch's DDP with its hook, the fastest of its option sets. torch's 8 bit hook chains collectives,
which over Gloo abort where there are several buckets: it has one. Sides run in rounds of fresh
processes, odd rounds reversed, with both classes without compression beside them.

A target is met when the median of the paired ratios is at or below it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from measure.bench_options import run_in_parts
from measure.cpp_ranks import run_cpp_ranks
from measure.fresh_run import run_fresh
from measure.sides import DDP_GLOO, TORCH_DDP, TORCH_VIEW, compressed, hooked
from measure.stats import PairedRatio
from measure.step_runs import FULL, QUICK, Effort, Match, StepRuns
from measure.table import table

NUMEL = 1 << 24
PASS, PASS_BYTES = "in-place pass", 8
STEPS_PER_CALL = 4  # a call takes as long as a part of a step
# A gradient, what was kept, what is kept, and the code with its scales.
CODE_BYTES = {
    "int8": 12 + 1 + 4 / 256,
    "int4": 12 + 1 / 2 + 4 / 64,
    "sign": 12 + 1 / 8 + 4 / 256,
    "fp16": 12 + 2,
}
SHARE_TARGETS = {"int8": 0.5, "sign": 0.5}  # of the pass' bytes per second

WORKLOAD = "mlp"
ONE_BUCKET = {"bucket_cap_mb": 1000}
MATCHES = (
    Match([compressed("Fp16")], hooked(TORCH_DDP, "fp16 hook"), 0.85),
    Match([compressed("Bf16")], hooked(TORCH_DDP, "bf16 hook"), 0.85),
    Match([compressed("Int8")], hooked([TORCH_VIEW], "8 bit hook", **ONE_BUCKET), 0.25),
)
PLAIN = (DDP_GLOO, TORCH_VIEW)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    return run_in_parts("bench_compression", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    results[part] = PARTS[part](QUICK if quick else FULL)
    return True


def bench_codes(effort: Effort) -> dict[str, Any]:
    """Measures and prints what codes cost; returns its part of the JSON."""
    calls = effort.steps // STEPS_PER_CALL
    times = json.loads(run_program(effort.rounds, calls, NUMEL))
    sides: dict[str, Any] = {PASS: {"us": times[PASS], "bytes": PASS_BYTES}}
    for side, moved in CODE_BYTES.items():
        sides[side] = {"us": times[side], "bytes": moved, "ratio": _ratio(side, times)}
    print(table(["", "ns", "bytes", "of the pass", "target"], [*map(_row, sides, sides.values())]))
    print(flush=True)
    return {"numel": NUMEL, "sides": sides}


def _ratio(side: str, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Time per byte, of the pass'; with a verdict where there is a target."""
    share = SHARE_TARGETS.get(side)
    ratio = PairedRatio.of(
        [us / CODE_BYTES[side] for us in times[side]],
        [us / PASS_BYTES for us in times[PASS]],
        1 / share if share else 1.0,
    ).to_json()
    return {key: ratio[key] for key in ratio if share or key not in ("target", "verdict")}


def _row(label: str, side: Mapping[str, Any]) -> list[str]:
    ratio = side.get("ratio", {})
    return [
        label,
        f"{1e3 * statistics.median(side['us']) / NUMEL:.2f}",
        f"{side['bytes']:.2f}",
        f"{1 / ratio['median']:.0%}" if ratio else "",
        f"{1 / ratio['target']:.0%}: {ratio['verdict']}" if "target" in ratio else "",
    ]


def run_program(rounds: int, calls: int, numel: int) -> str:
    """What benchmarks/cpp/block_codes.cpp prints."""
    return run_cpp_ranks("bench_compression", "block_codes", [*map(str, (rounds, calls, numel))], 1)


def bench_steps(effort: Effort) -> dict[str, Any]:
    """Measures and prints steps of a model; returns its part of the JSON."""
    runs = StepRuns(lambda side: run_fresh(side, WORKLOAD, effort.steps))
    runs.add([side for match in MATCHES for side in (*match.ours, *match.theirs)], 1)
    contests = runs.contests(MATCHES, PLAIN, effort.rounds)
    runs.print_with(contests)
    return {
        "workload": WORKLOAD,
        "plain": [side.label for side in PLAIN],
        "contests": [asdict(contest) for contest in contests],
        "runs": runs.to_json(),
    }


PARTS: Mapping[str, Callable[[Effort], Any]] = {"codes": bench_codes, "steps": bench_steps}


if __name__ == "__main__":
    sys.exit(main())
