"""fully_shard on two hosts of two ranks: what crosses the cable in a step, and how long that takes.

    python benchmarks/bench_hosts.py --json benchmarks/results/hosts.json

The hosts are namespaces of this machine (examples/two_hosts.sh; needs root), and the bytes those
that the network interface of each has counted, headers and all. The cable between them is as fast
as memory, and ranks are more than a small machine has cores: step times say what strategies cost
the CPU, and are no model of a real network. Rounds of one run per side, every other round in
reversed order; each block of `mlp` is a unit; all sides step with the same fused AdamW.

A target is met when the median of the paired ratios is at or below it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from measure.bench_options import begin_results, bench_parser, chosen_parts
from measure.exit_codes import exit_code
from measure.hosts_run import HOSTS, HostsRun, TwoHosts
from measure.results import write_results
from measure.sides import FSDP, TORCH_FSDP2, Side
from measure.stats import PairedRatio
from measure.step_runs import measure_all
from measure.table import table

WORKLOAD = "mlp"
PARTS = (WORKLOAD,)
RANKS_PER_HOST = 2
BYTES_TARGET = 0.5

OURS, TORCH = FSDP, TORCH_FSDP2[:2]


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options or no namespaces,
    3 a rank failed."""
    arguments = bench_parser(__doc__, PARTS).parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: Any) -> int:
    chosen_parts("bench_hosts", arguments.only, PARTS)
    rounds, steps = (2, 3) if arguments.quick else (5, 10)
    results = begin_results(arguments.quick)
    runs = measure_all((OURS, *TORCH), rounds, lambda side: run_on_hosts(side, steps))
    rows = [
        [
            label,
            f"{min(run.step_ms for run in found):.0f} to {max(run.step_ms for run in found):.0f}",
            *(f"{found[-1].sent_mb[host]:.1f}" for host in range(HOSTS)),
        ]
        for label, found in runs.items()
    ]
    print(table(["2 hosts x 2 ranks, mlp", "step ms", "host 0 sends MB", "host 1"], rows))
    sent = {label: [sum(run.sent_mb) for run in found] for label, found in runs.items()}
    ratios = {
        side.label: PairedRatio.of(sent[OURS.label], sent[side.label], BYTES_TARGET)
        for side in TORCH
    }
    for label, ratio in ratios.items():
        print(f"bytes, fsdp / {label}:")
        print("\n".join("  " + line for line in ratio.lines()))
    results["workloads"][WORKLOAD] = {
        "runs": {label: [asdict(run) for run in found] for label, found in runs.items()},
        "bytes_ratios": {label: ratio.to_json() for label, ratio in ratios.items()},
    }
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


def run_on_hosts(side: Side, steps: int) -> HostsRun:
    """One run in fresh processes. Raises RankFailed, and BadInput where there are no namespaces."""
    return TwoHosts("bench_hosts", WORKLOAD, RANKS_PER_HOST).run(side, steps)


if __name__ == "__main__":
    sys.exit(main())
