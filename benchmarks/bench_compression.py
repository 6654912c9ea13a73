"""Gradient compression: what codes cost on one core, and steps over Gloo beside torch's hooks.

    python benchmarks/bench_compression.py --json benchmarks/results/compression.json
    python benchmarks/bench_compression.py --only steps --quick

codes (10 seconds): to code 16.8 M fp32 gradients, what is kept of them included, beside an in-place
multiplication of as many, in turns. Bytes moved count a gradient, what was kept, what is kept and
the code; the pass reads and writes a gradient. Needs the target `block_codes`
(benchmarks/cpp/block_codes.cpp).

steps (10 minutes): `mlp` over Gloo on this machine, 2 ranks of one thread, between="ranks", beside
torch's DDP with its hook, the fastest of its option sets. torch's hooks of 8 bits and of PowerSGD
chain collectives, which over Gloo abort where there are several buckets: they have one. Sides run
in rounds of fresh processes, odd rounds reversed, with both classes without compression beside
them.

one_host (2 minutes): `mlp` on this host, 2 ranks of one thread, with `compression=` set, which
changes nothing there, beside none.

100mbit, 1gbit, no_limit (15, 4, 4 minutes): `gpt-small-batch` on two hosts of one rank of one
thread, which are namespaces of this machine (examples/two_hosts.sh; needs root), over a cable of
that rate, beside torch's DDP and its hooks. A machine of two cores is as busy with the cable as
with training.

quality (10 minutes): what is lost on data that nobody trains on, after as many steps, with and
without error feedback: drawn digits and the next character of Python's standard library, 2 ranks,
3 seeds; a ratio is that to DDP without compression from the same seed.

A target is met when the median of the paired ratios is at or below it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from measure.bench_options import run_in_parts
from measure.cpp_ranks import run_cpp_ranks
from measure.fresh_run import run_fresh
from measure.hosts_run import HostsRun, TwoHosts
from measure.quality_run import compare_losses, train_to_quality
from measure.sides import (
    DDP,
    DDP_GLOO,
    TORCH_DDP,
    TORCH_VIEW,
    Side,
    compressed,
    compressed_between_hosts,
    hooked,
)
from measure.stats import PairedRatio
from measure.step_runs import FULL, QUICK, Effort, Match, StepRuns, measure_all
from measure.strategies import POWER_SGD_HOOK
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
    "top 1 %": 12 + 0.08,
}
SHARE_TARGETS = {"int8": 0.5, "sign": 0.5, "top 1 %": 0.5}  # of the pass' bytes per second

WORKLOAD = "mlp"
ONE_BUCKET = {"bucket_cap_mb": 1000}
POWER_SGD = {"rank": 4, "start_step": 2}  # plain while a run warms up, as under torch's hook
MATCHES = (
    Match([compressed("Fp16")], hooked(TORCH_DDP, "fp16 hook"), 0.85),
    Match([compressed("Bf16")], hooked(TORCH_DDP, "bf16 hook"), 0.85),
    Match([compressed("Int8")], hooked([TORCH_VIEW], "8 bit hook", **ONE_BUCKET), 0.25),
    Match(
        [compressed("PowerSGD", **POWER_SGD)],
        hooked([TORCH_VIEW], POWER_SGD_HOOK, **ONE_BUCKET),
        0.60,
    ),
)
PLAIN = (DDP_GLOO, TORCH_VIEW)
ONE_HOST = (Match([compressed_between_hosts("Int8")], [DDP], 1.01),)

CABLES = {"100mbit": "100mbit", "1gbit": "1gbit", "no_limit": ""}
CABLE_WORKLOAD = "gpt-small-batch"
# How many times faster than torch's DDP a step is over the slowest cable, at least.
TIMES_FASTER = {"Int8": 3.5, "Int4": 5.5, "Sign": 12.0, "PowerSGD": 14.0, "TopK": 14.0}
METHOD_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "PowerSGD": POWER_SGD,
    "TopK": {"density": 0.01},
}
# Of the loss of DDP without compression, on data that nobody trains on.
LOSS_TARGETS = {"Int8": 1.01, "Int4": 1.01, "PowerSGD 4": 1.01, "TopK 1 %": 1.03, "Sign": 1.03}
OURS = [
    *(compressed_between_hosts(name, **METHOD_OPTIONS.get(name, {})) for name in TIMES_FASTER),
    compressed_between_hosts("Fp16"),
    DDP,
]
THEIRS = [
    TORCH_VIEW,
    *hooked([TORCH_VIEW], "fp16 hook"),
    *hooked([TORCH_VIEW], POWER_SGD_HOOK, **ONE_BUCKET),
]


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    return run_in_parts("bench_compression", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    effort = QUICK if quick else FULL
    if part in ("steps", "one_host"):
        effort = replace(effort, rounds=min(effort.rounds, 3))
    results[part] = PARTS[part](effort)
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


def bench_steps(
    effort: Effort, matches: Sequence[Match] = MATCHES, plain: Sequence[Side] = PLAIN
) -> dict[str, Any]:
    """Measures and prints steps of a model; returns its part of the JSON."""
    runs = StepRuns(lambda side: run_fresh(side, WORKLOAD, effort.steps))
    runs.add([side for match in matches for side in (*match.ours, *match.theirs)], 1)
    contests = runs.contests(matches, plain, effort.rounds)
    runs.print_with(contests)
    return {
        "workload": WORKLOAD,
        "plain": [side.label for side in plain],
        "contests": [asdict(contest) for contest in contests],
        "runs": runs.to_json(),
    }


def bench_cable(cable: str, effort: Effort) -> dict[str, Any]:
    """Measures and prints steps between two hosts; returns its part of the JSON."""
    rounds, steps = (1, 2) if effort == QUICK else (2 if cable == "100mbit" else 1, 3)
    runs = measure_all((*OURS, *THEIRS), rounds, lambda side: run_on_cable(side, cable, steps))
    times = {label: [run.step_ms for run in found] for label, found in runs.items()}
    plain = times[TORCH_VIEW.label]
    contests = {
        side.label: PairedRatio.of(times[side.label], plain, 1 / TIMES_FASTER[method])
        for side in OURS
        if cable == "100mbit" and (method := side.options.get("method")) in TIMES_FASTER
    }
    rows = [
        [
            label,
            f"{statistics.median(times[label]):.1f}",
            f"{statistics.median(plain) / statistics.median(times[label]):.2f}",
            f"{max(found[-1].sent_mb):.2f}",
            f"{1 / contests[label].target:.1f}: {contests[label].verdict}"
            if label in contests
            else "",
        ]
        for label, found in runs.items()
    ]
    print(table([cable, "step ms", "times faster", "MB sent", "target"], rows))
    print(flush=True)
    return {
        "workload": CABLE_WORKLOAD,
        "plain": TORCH_VIEW.label,
        "runs": {label: [asdict(run) for run in found] for label, found in runs.items()},
        "contests": {label: ratio.to_json() for label, ratio in contests.items()},
    }


def run_on_cable(side: Side, cable: str, steps: int) -> HostsRun:
    """One run in fresh processes. Raises RankFailed, and BadInput where there are no namespaces."""
    return TwoHosts("bench_compression", CABLE_WORKLOAD, 1, CABLES[cable]).run(side, steps)


def bench_quality(effort: Effort) -> dict[str, Any]:
    """Measures and prints what models have learned; returns its part of the JSON."""
    seeds, steps = (1, 20) if effort == QUICK else (3, 3000)
    return compare_losses(train_to_quality("compression", seeds, steps), steps, LOSS_TARGETS)


PARTS: Mapping[str, Callable[[Effort], Any]] = {
    "codes": bench_codes,
    "steps": bench_steps,
    "one_host": partial(bench_steps, matches=ONE_HOST, plain=()),
    **{cable: partial(bench_cable, cable) for cable in CABLES},
    "quality": bench_quality,
}


if __name__ == "__main__":
    sys.exit(main())
