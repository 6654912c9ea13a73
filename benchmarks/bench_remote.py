"""Remote calls and modules beside torch RPC (TensorPipe), on one host.

    python benchmarks/bench_remote.py --json benchmarks/results/remote.json
    python benchmarks/bench_remote.py --only calls,module --quick

calls (1 minute): a function that gives back the tensor that it is called with, of 4 bytes, 1 MiB
and 25 MiB; beside them the same bytes there and back by send and recv of our backend, and one copy
(measure/remote_calls.py).

cpp (1 minute): a call with 4 bytes from C++ to C++, which torch RPC has not. Needs the target
`remote_calls` (benchmarks/cpp/remote_calls.cpp).

module (1 minute): forward and backward of `Linear(1024, 1024)` at another process, batch 32,
beside RemoteModule under dist_autograd (measure/remote_modules.py).

batch (1 minute): calls of 4 callers that one callee serves 4 at a time, beside
rpc.functions.async_execution; each caller has 16 under way (measure/remote_batches.py).

memory (1 minute): what caller and callee hold after 100,000 calls and 1,000 dropped forwards
(measure/remote_memory.py).

faults (1 minute): a callee is killed or stopped, a caller is killed (measure/remote_faults.py).

All sides of a part take turns in the same processes of one thread each, in alternating order. A
wheel of torch without RPC has cpp, memory and faults only.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from measure.bad_input import BadInput
from measure.bench_options import run_in_parts
from measure.cpp_ranks import run_cpp_ranks
from measure.machine import cores
from measure.remote_batches import BatchCase, measure_batches
from measure.remote_calls import NAMES, CallsCase, measure_calls
from measure.remote_faults import FAULTS, RemoteFault, measure_remote_fault
from measure.remote_memory import HeldAfter, MemoryCase, measure_remote_memory
from measure.remote_modules import ModuleCase, measure_module
from measure.stats import PairedRatio, verdict
from measure.step_runs import FULL, QUICK, Effort
from measure.table import print_times, table

MIB = 1 << 20
SIZES = {"4 B": 4, "1 MiB": MIB, "25 MiB": 25 * MIB}
CALLS_TARGETS = {"4 B": 0.15, "1 MiB": 0.4, "25 MiB": 0.6}  # RPC's time counts as 1
BYTES_PER_BLOCK, MOST_CALLS = 500 * MIB, 1000
CPP_TARGET_US = 5.0
CPP_WITH_TARGET = ("call",)
MODULE_TARGET = 0.4  # RPC's time counts as 1
BATCH_TARGET = 3.0  # times as many calls per second
MEMORY_TARGET = 0.01  # growth of the resident memory
FAULT_TRIES = 5


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options or no RPC, 3 a rank
    failed."""
    return run_in_parts("bench_remote", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    if part in NEEDS_RPC:
        require_rpc()
    print(f"{part}:", flush=True)
    results[part] = PARTS[part](QUICK if quick else FULL)
    return True


def require_rpc() -> None:
    """Raises BadInput where this torch was built without RPC."""
    if not dist.rpc.is_available():
        raise BadInput(
            "bench_remote",
            f"got torch {torch.__version__} without torch.distributed.rpc, expected it with RPC",
            f"Leave out {', '.join(NEEDS_RPC)}, or install another torch.",
        )


def bench_calls(effort: Effort) -> dict[str, Any]:
    """Measures and prints calls with a tensor; returns its part of the JSON."""
    found = {}
    for size, length in SIZES.items():
        calls = min(MOST_CALLS, BYTES_PER_BLOCK // length)
        if effort is QUICK:
            calls = max(3, calls // 20)
        times = measure_calls(CallsCase(length, calls, effort.rounds))
        ratio = PairedRatio.of(times["ours"], times["rpc"], CALLS_TARGETS[size])
        print_times(f"{size} in and out, 2 processes on {cores()} cores", times, _beside(ratio))
        found[size] = {"calls": calls, "times_us": times, "ratio_to_rpc": ratio.to_json()}
    return found


def bench_cpp(effort: Effort) -> dict[str, Any]:
    """Measures and prints calls in C++; returns its part of the JSON."""
    times = json.loads(run_program(effort.rounds))
    ratios = {
        name: PairedRatio.of(times[name], [1.0] * len(times[name]), CPP_TARGET_US)
        for name in CPP_WITH_TARGET
    }
    notes = {name: f"target {CPP_TARGET_US} us: {ratio.verdict}" for name, ratio in ratios.items()}
    print_times("4 B in and out, C++", times, notes)
    verdicts = {name: ratio.verdict for name, ratio in ratios.items()}
    return {"times_us": times, "target_us": CPP_TARGET_US, "verdicts": verdicts}


def run_program(rounds: int, calls: int = 20000) -> str:
    """What rank 0 of benchmarks/cpp/remote_calls.cpp prints."""
    return run_cpp_ranks("bench_remote", "remote_calls", [str(rounds), str(calls)], len(NAMES))


def bench_module(effort: Effort) -> dict[str, Any]:
    """Measures and prints forward and backward elsewhere; returns its part of the JSON."""
    case = ModuleCase(calls=5 if effort is QUICK else 100, rounds=effort.rounds)
    times = measure_module(case)
    ratio = PairedRatio.of(times["ours"], times["rpc"], MODULE_TARGET)
    what = f"Linear({case.width}, {case.width}), batch {case.batch}"
    print_times(f"{what}, forward and backward", times, _beside(ratio))
    return {**asdict(case), "times_us": times, "ratio_to_rpc": ratio.to_json()}


def bench_batch(effort: Effort) -> dict[str, Any]:
    """Measures and prints calls that are served together; returns its part of the JSON."""
    case = BatchCase(calls=40 if effort is QUICK else 1000, rounds=effort.rounds)
    times = measure_batches(case)
    ratio = PairedRatio.of(times["ours"], times["rpc"], 1 / BATCH_TARGET)
    note = f"{1 / ratio.median:.1f}x rpc's calls/s, target {BATCH_TARGET:g}x: {ratio.verdict}"
    title = f"{case.callers} callers, {case.in_flight} calls of each under way"
    print_times(f"{title}, {case.callers + 1} processes on {cores()} cores", times, {"ours": note})
    per_s = {side: [1e6 / us for us in found] for side, found in times.items()}
    return {
        **{**asdict(case), "times_us": times, "calls_per_s": per_s},
        "ratio_to_rpc": ratio.to_json(),
    }


def bench_memory(effort: Effort) -> dict[str, Any]:
    """Measures and prints what two processes hold; returns its part of the JSON."""
    case = MemoryCase(1000, 20) if effort is QUICK else MemoryCase()
    rows = _growths(measure_remote_memory(case))
    cells = [
        [
            f"{row['process']}, after {row['after']}",
            f"{row['rss_mib']:.1f}",
            f"{row['at_first_mib']:.1f}",
            f"{row['growth']:+.2%}",
            f"{row['written_grown_mib']:+.2f}",
            row["verdict"],
        ]
        for row in rows
    ]
    print(f"{case.calls} calls, {case.forwards} dropped forwards; target {MEMORY_TARGET:.0%}")
    header = ["", "RSS MiB", "after warm-up", "growth", "written MiB", ""]
    print(table(header, cells), "\n", flush=True)
    return {**asdict(case), "target": MEMORY_TARGET, "rows": rows}


def _growths(held: HeldAfter) -> list[dict[str, Any]]:
    rows = []
    for process in NAMES:
        first = held.warm_up[process]
        for after, reading in (("calls", held.calls), ("dropped forwards", held.forwards)):
            now = reading[process]
            growth = now["rss"] / first["rss"] - 1
            rows.append(
                {
                    **{"process": process, "after": after, "growth": growth},
                    **{"rss_mib": now["rss"], "at_first_mib": first["rss"]},
                    "written_grown_mib": now["written"] - first["written"],
                    "verdict": verdict(growth, MEMORY_TARGET),
                }
            )
    return rows


def bench_faults(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints how soon a loss is known; returns its part of the JSON."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the ranks' errors are what is wanted
    rows = [_fault_row(fault, 1 if effort is QUICK else FAULT_TRIES) for fault in FAULTS]
    cells = [
        [
            row["kind"],
            row["counted_from"],
            f"{row['median_s']:.3f}",
            f"{row['most_s']:.3f}",
            f"{row['target_s']:g}: {row['verdict']}",
        ]
        for row in rows
    ]
    print("until the caller has raised, or the owner has freed what it kept")
    print(table(["", "counted from", "median s", "most s", "target"], cells))
    for row in rows:
        if row["text"]:
            print(f"{row['kind']}: {row['raised']}: {row['text']}")
    print(flush=True)
    return rows


def _fault_row(fault: RemoteFault, tries: int) -> dict[str, Any]:
    lost = [measure_remote_fault(fault) for _ in range(tries)]
    seconds = [death.seconds for death in lost]
    return {
        **{"kind": fault.kind, "counted_from": fault.counted_from, "seconds": seconds},
        **{"median_s": statistics.median(seconds), "most_s": max(seconds)},
        **{"target_s": fault.seconds, "verdict": verdict(max(seconds), fault.seconds)},
        **{"raised": lost[0].raised, "text": lost[0].text},
    }


def _beside(ratio: PairedRatio) -> dict[str, str]:
    low, high = ratio.quartiles
    return {
        "ours": f"{ratio.median:.3f} of rpc ({low:.3f} to {high:.3f}), "
        f"target {ratio.target:g}: {ratio.verdict}"
    }


PARTS: dict[str, Callable[[Effort], Any]] = {
    "calls": bench_calls,
    "cpp": bench_cpp,
    "module": bench_module,
    "batch": bench_batch,
    "memory": bench_memory,
    "faults": bench_faults,
}
NEEDS_RPC = ("calls", "module", "batch")


if __name__ == "__main__":
    sys.exit(main())
