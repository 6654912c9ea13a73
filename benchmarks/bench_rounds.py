"""LocalSGD and DiLoCo over slow links, beside torch's DDP and its averager in the same run.

    python benchmarks/bench_rounds.py --json benchmarks/results/rounds.json
    python benchmarks/bench_rounds.py --only 100mbit --quick

Parts are the rates of the cable between two hosts of one rank each: 100mbit, 1gbit and none (no
limit), and `host`: two ranks of one host, for what an average costs where there is no link. The
hosts are namespaces of this machine (examples/two_hosts.sh, which shapes the cable by tc tbf; needs
root); a machine of two cores is as busy with the link as with training. `gpt-small-batch`, rounds
of 50 steps (SparseLoCo: 30), timed over whole rounds, fresh processes in turns.

quality: what is lost on data that nobody trains on, after as many steps, in rounds of 20: drawn
digits and the next character of Python's standard library, 2 workers, 3 seeds; a ratio is that to
DDP from the same seed.

A target is met when the median of the paired ratios is at or below it.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure.bench_options import run_in_parts
from measure.hosts_run import run_launched
from measure.quality_run import compare_losses, train_to_quality
from measure.stats import PairedRatio, verdict
from measure.table import table

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "benchmarks" / "measure" / "rounds_worker.py"
PARTS: Mapping[str, str | None] = {"100mbit": "100mbit", "1gbit": "1gbit", "none": "", "host": None}
RUN_LIMIT_S = 1200

DDP, ALONE = "torch DDP", "no exchange"
ROUNDS = {
    "torch averager": 50,
    "LocalSGD": 50,
    "DiLoCo at once": 50,
    "DiLoCo in fragments": 50,
    "SparseLoCo": 30,
}
# Of a step of torch's DDP over 100 Mbit/s; of a step without exchange.
OF_DDP = {"DiLoCo at once": 1 / 18, "DiLoCo in fragments": 1 / 35, "SparseLoCo": 1 / 35}
ON_HOST = (DDP, ALONE, "LocalSGD", "DiLoCo at once")  # what is measured without a link
LOSS_TARGETS = {"DiLoCo at once": 1.01, "DiLoCo in fragments": 1.01, "SparseLoCo": 1.03}
HELD_MODELS = 2.0
OF_ALONE = {"100mbit": {"DiLoCo in fragments": 1 / 0.85}, "host": {"LocalSGD": 1.02}}


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options or no namespaces,
    3 a rank failed."""
    return run_in_parts("bench_rounds", __doc__, [*PARTS, "quality"], _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    if part == "quality":
        seeds, quality_steps = (1, 40) if quick else (3, 3000)
        losses = train_to_quality("rounds", seeds, quality_steps)
        results[part] = compare_losses(losses, quality_steps, LOSS_TARGETS)
        return True
    turns, periods = (1, 1) if quick else ({"100mbit": 3, "host": 3}.get(part, 1), 2)
    runs: dict[str, list[dict[str, float]]] = {
        side: [] for side in (DDP, ALONE, *ROUNDS) if PARTS[part] is not None or side in ON_HOST
    }
    for turn in range(turns):
        sides = list(runs) if turn % 2 == 0 else list(runs)[::-1]
        for side in sides:
            period = 10 if quick else ROUNDS.get(side, 50)
            is_short = PARTS[part] is not None and side not in ROUNDS  # no round to be whole
            steps = (3 if quick else 10) if is_short else periods * period
            runs[side].append(run_side(side, PARTS[part], period, steps, quick))
    results[part] = {"runs": runs, "ratios": _ratios(part, runs)}
    print(table(["", "ms", "of DDP", "of alone", "MB sent a step"], _rows(runs)), flush=True)
    for name, ratio in results[part]["ratios"].items():
        print(f"  {name}: {ratio['median']:.4f}, {ratio['verdict']}", flush=True)
    return True


def _ratios(part: str, runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    times = {side: [run["step_ms"] for run in found] for side, found in runs.items()}
    wanted = [(side, DDP, target) for side, target in OF_DDP.items() if part == "100mbit"]
    wanted += [(side, ALONE, target) for side, target in OF_ALONE.get(part, {}).items()]
    found = {
        f"{side} / {other}": PairedRatio.of(times[side], times[other], target).to_json()
        for side, other, target in wanted
    }
    if part == "host":  # anchor and outer momentum
        held = statistics.median(run["held_models"] for run in runs["DiLoCo at once"])
        found["DiLoCo holds, in models"] = {
            "median": held,
            "target": HELD_MODELS,
            "verdict": verdict(held, HELD_MODELS),
        }
    return found


def _rows(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[str]]:
    def median(side: str, what: str) -> float:
        return statistics.median(run[what] for run in runs[side])

    return [
        [
            side,
            f"{median(side, 'step_ms'):.1f}",
            f"{median(side, 'step_ms') / median(DDP, 'step_ms'):.3f}",
            f"{median(side, 'step_ms') / median(ALONE, 'step_ms'):.3f}",
            f"{median(side, 'sent') / 1e6:.2f}",
        ]
        for side in runs
    ]


def run_side(side: str, rate: str | None, period: int, steps: int, tiny: bool) -> dict[str, float]:
    """One run in fresh processes. Raises RankFailed, and BadInput where there are no namespaces."""
    benchmarks = str(ROOT / "benchmarks")
    paths = [benchmarks, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"RANKS": "1", "RATE": rate or "", **({"TINY": "1"} if tiny else {})}
    launch = ["bash", str(ROOT / "examples" / "two_hosts.sh")]
    if rate is None:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launch, str(WORKER), side, str(period), str(steps)]
    found = run_launched("bench_rounds", side, command, environment, 2, RUN_LIMIT_S)
    return {what: max(rank[what] for rank in found) for what in found[0]}


if __name__ == "__main__":
    sys.exit(main())
