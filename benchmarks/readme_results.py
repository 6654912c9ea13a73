"""Writes the results into README.md and docs/ from the committed JSON: no figure is typed by hand.

python benchmarks/readme_results.py          rewrite the pages
python benchmarks/readme_results.py --check  exit 1 if one of them is not what the JSON says
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.pages import host_memory, markdown, measured_on, median_of, phases, ratio_cells
from readme_checkpoint import checkpoint_tables
from readme_dp import dp_section, dp_tables
from readme_fsdp import (
    fsdp_section,
    fsdp_tables,
    gathered_tables,
    hosts_tables,
    strategy_tables,
)
from readme_summary import summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- results: written by benchmarks/readme_results.py from benchmarks/results/*.json -->\n"
END = "<!-- results end -->\n"
SHORT_LIST_BYTES = (64 << 10, 25 << 20)  # for collectives, in README


@dataclass(frozen=True)
class DdpRun:
    """A committed run of bench_ddp.py."""

    file: str
    ours: str  # the side
    over: str  # what gradients went over


DDP_RUNS = (
    DdpRun("ddp_shm.json", "ddp, shared memory", "ours through shared memory, torch's over Gloo"),
    DdpRun("ddp.json", "ddp", "both over Gloo"),
)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args(command_line)
    stale = 0
    pages = {
        "README.md": section(),
        "docs/shared_memory.md": shared_memory_tables(),
        "docs/ddp.md": ddp_tables(),
        "docs/zero.md": zero_tables(),
        "docs/fsdp.md": sharding_tables(),
        "docs/data_parallel.md": data_parallel_tables(),
        "docs/strategies.md": all_strategies(),
        "docs/optimizers.md": optimizer_tables(),
        "docs/checkpoint.md": loading_tables(),
        "docs/multi_host.md": hosts_page(),
    }
    for name, written in pages.items():
        page = ROOT / name
        before = page.read_text()
        head, rest = before.split(BEGIN)
        _, tail = rest.split(END)
        after = head + BEGIN + written + END + tail
        if not arguments.check:
            page.write_text(after)
        elif before != after:
            stale = 1
            print(
                f"[readme] got figures in {name} that are not those of benchmarks/results. "
                "Run benchmarks/readme_results.py."
            )
    return stale


def shared_memory_tables() -> str:
    """What happens when a rank is lost; collectives, also with more ranks than CPUs."""
    text = fault_times()
    for name in ("collectives.json", "collectives_4_ranks.json"):
        if (RESULTS / name).exists():
            text += _collectives(_load(name)) + "\n"
    return text


def fault_times() -> str:
    """How long until the others raise when a rank is lost."""
    if not (RESULTS / "faults.json").exists():
        return "\nNo run is committed yet.\n\n"
    results = _load("faults.json")
    rows = [
        [case["kind"], str(case["ranks"]), f"{case['median_ms']:.1f}", f"{case['max_ms']:.1f}"]
        for case in results["cases"]
    ]
    title = (
        f"`bench_faults.py`, {results['machine']['cores']} cores, all-reduce of 25 MiB from "
        f"Python, {results['tries']} tries each; until the last of the other ranks has raised:\n\n"
    )
    header = ["the last rank is", "ranks", "median ms", "most ms"]
    return "\n" + title + markdown(header, rows) + measured_on(results) + "\n"


def optimizer_tables() -> str:
    """Steps beside torch's fused ones and beside an in-place pass over as many bytes."""
    if not (RESULTS / "optimizers.json").exists():
        return "\nNo run is committed yet.\n\n"
    header = [
        "",
        "step, ms",
        "torch's fused, ms",
        "ratio (quartiles)",
        "of an in-place pass, target 85 %",
    ]
    text = ""
    results = _load("optimizers.json")
    for device, rows in results["devices"].items():
        cells = []
        for name, row in rows.items():
            low, high = row["time_ratio"]["quartiles"]
            ratio = f"{row['time_ratio']['median']:.3f} ({low:.3f} to {high:.3f})"
            in_place = row.get("in_place_ratio")
            reached = f"{1 / in_place['median']:.0%}: {in_place['verdict']}" if in_place else ""
            times = [f"{row['step_ms']:.2f}", f"{row['torch_step_ms']:.2f}"]
            cells.append([name, *times, ratio, reached])
        text += f"\n`bench_optimizers.py`, {device}:\n\n" + markdown(header, cells)
    return text + measured_on(results) + "\n"


def zero_tables() -> str:
    """Every side of bench_zero.py, and what a host holds."""
    if not (RESULTS / "zero.json").exists():
        return "\nNo run is committed yet.\n\n"
    results = _load("zero.json")
    parts = [_bench_zero(results)] if results["workloads"] else []
    for name, workload in results["workloads"].items():
        parts.append(f"`{name}`:\n\n" + phases(workload["runs"]))
    if "memory" in results:
        parts.append(host_memory(results["memory"]))
    return "\n" + "\n".join(parts) + "\n"


def sharding_tables() -> str:
    """Every part of bench_fsdp.py."""
    text = _tables_of("fsdp.json", fsdp_tables)
    if (RESULTS / "fsdp_gathered.json").exists():
        text += gathered_tables(_load("fsdp_gathered.json")) + "\n"
    return text


def hosts_page() -> str:
    """Every part of bench_hosts.py."""
    return _tables_of("hosts.json", hosts_tables)


def data_parallel_tables() -> str:
    """Every part of bench_dp.py."""
    return _tables_of("dp.json", dp_tables)


def loading_tables() -> str:
    """Every part of bench_checkpoint.py."""
    return _tables_of("checkpoint.json", checkpoint_tables)


def ddp_tables() -> str:
    """Every run of bench_ddp.py."""
    parts = [_bench_ddp(_load(one.file), one) for one in DDP_RUNS if (RESULTS / one.file).exists()]
    return "\n" + "\n".join(parts or ["No run is committed yet.\n"]) + "\n"


def all_strategies() -> str:
    """What the benchmarks of one strategy each say of all of them."""
    names = ("fsdp.json", "zero.json", "ddp_shm.json", "dp.json")
    return strategy_tables([_load(name) for name in names if (RESULTS / name).exists()])


def section() -> str:
    """What a reader should know first, then the tables, from whichever result files there are."""
    parts = []
    found = {path.stem: _load(path.name) for path in RESULTS.glob("*.json")}
    if lines := summary(found):
        parts.append(lines)
    if (RESULTS / "compare_gpt.json").exists():
        parts.append(_compare(_load("compare_gpt.json")))
    if (RESULTS / "collectives.json").exists():
        parts.append(_collectives(_load("collectives.json"), SHORT_LIST_BYTES))
    if (RESULTS / DDP_RUNS[0].file).exists():
        parts.append(_bench_ddp(_load(DDP_RUNS[0].file), DDP_RUNS[0]))
    if (RESULTS / "zero.json").exists():
        parts.append(_bench_zero(_load("zero.json")))
    if (RESULTS / "fsdp.json").exists() and _load("fsdp.json")["workloads"]:
        parts.append(fsdp_section(_load("fsdp.json"), against="torch"))
    if (RESULTS / "dp.json").exists() and _load("dp.json")["workloads"]:
        parts.append(dp_section(_load("dp.json")))
    return "\n" + "\n".join(parts or ["No run is committed yet.\n"]) + "\n"


def _tables_of(name: str, tables: Callable[[dict[str, Any]], str]) -> str:
    if not (RESULTS / name).exists():
        return "\nNo run is committed yet.\n\n"
    return tables(_load(name))


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return loaded


def _compare(results: dict[str, Any]) -> str:
    rows = []
    for run in results["runs"]:
        step = run["step_ms"]
        exposed = f"{run['exposed_comm_ms'] / step['median']:.1%}" if run["world"] > 1 else ""
        rows.append(
            [
                run["strategy"],
                str(run["world"]),
                f"{step['median']:.0f} ({step['p10']:.0f} to {step['p90']:.0f})",
                f"{run['samples_per_s']:.1f}",
                exposed,
                f"{run['peak_rss_mib_per_rank']:.0f}",
                f"{run['final_loss']:.4f}",
            ]
        )
    header = [
        "strategy",
        "ranks",
        "step ms (p10 to p90)",
        "samples/s",
        "exposed comm",
        "peak MiB/rank",
        "final loss",
    ]
    title = "`make compare`, GPT on text, same batches everywhere:\n\n"
    return title + markdown(header, rows) + measured_on(results)


def _collectives(results: dict[str, Any], sizes_shown: Sequence[int] = ()) -> str:
    rows = []
    for operation, sizes in results["operations"].items():
        for size, found in sizes.items():
            if sizes_shown and int(size) not in sizes_shown:
                continue
            times, ratio = found["times_us"], found["ratio_to_gloo"]
            low, high = (1 / quartile for quartile in reversed(ratio["quartiles"]))
            rows.append(
                [
                    operation,
                    _bytes_text(int(size)),
                    f"{statistics.median(times['ours']):.1f}",
                    f"{statistics.median(times['gloo']):.1f}",
                    f"{1 / ratio['median']:.1f} ({low:.1f} to {high:.1f})",
                    f"{1 / ratio['target']:.0f}: {ratio['verdict']}" if ratio["target"] < 1 else "",
                    f"{found['ratio_to_copy']['median']:.2f}",
                ]
            )
    header = [
        "collective",
        "bytes",
        "trireme, us",
        "Gloo, us",
        "times faster (quartiles)",
        "target",
        "of a copy's time",
    ]
    title = (
        f"`bench_collectives.py`, {results['ranks']} ranks x 1 thread, fp32, through "
        "torch.distributed from Python:\n\n"
    )
    return title + markdown(header, rows) + measured_on(results)


def _bytes_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _bench_ddp(results: dict[str, Any], run: DdpRun) -> str:
    rows = []
    for name, workload in results["workloads"].items():
        ratio = workload["step_ratio"]
        low, high = ratio["quartiles"]
        steps = {
            label: statistics.median(run["step_ms"] for run in runs)
            for label, runs in workload["runs"].items()
        }
        rows.append(
            [
                name,
                f"{steps['1 process']:.0f}",
                f"{steps['2 ranks, no sync']:.0f}",
                f"{steps[workload['torch_best']]:.0f} ({workload['torch_best']})",
                f"{steps[run.ours]:.0f}",
                f"{ratio['median']:.3f} ({low:.3f} to {high:.3f})",
                f"{ratio['target']:g}: {ratio['verdict']}",
                f"{workload['memory']['ratio']:.3f}",
            ]
        )
    header = [
        "workload",
        "1 process x 2 threads, ms",
        "2 ranks, no sync",
        "torch DDP, its best",
        "trireme DDP",
        "ratio (quartiles)",
        "target",
        "memory ratio",
    ]
    text = (
        f"`bench_ddp.py`, 2 ranks x 1 thread, {run.over}, median step of fresh processes in "
        "pairs:\n\n"
    )
    text += markdown(header, rows)
    if "reducer_overhead" in results:
        ratio = results["reducer_overhead"]["added_ratio"]
        text += (
            "\nWhat the reducer adds to a step of 1,000 parameters of 64 elements, over torch's "
            f"fake process group: {ratio['median']:.2f} of what torch's adds (target "
            f"{ratio['target']:g}: {ratio['verdict']}).\n"
        )
    return text + measured_on(results)


def _bench_zero(results: dict[str, Any]) -> str:
    rows = []
    for name, workload in results["workloads"].items():
        runs = workload["runs"]
        for contest in workload["contests"]:
            ours, theirs, torch_zero = (
                f"{median_of(runs[label], 'step_ms'):.0f} ({label})"
                for label in (contest["ours"], contest["theirs"], workload["torch_zero_best"])
            )
            rows.append(
                [
                    name,
                    f"{median_of(runs['1 process'], 'step_ms'):.0f}",
                    f"{median_of(runs['2 ranks, no sync'], 'step_ms'):.0f}",
                    torch_zero,
                    theirs,
                    ours,
                    *ratio_cells(contest["ratio"]),
                ]
            )
    header = [
        "workload",
        "1 process x 2 threads, ms",
        "2 ranks, no sync",
        "torch ZeRO-1, its best",
        "measured against",
        "trireme ZeRO",
        "ratio (quartiles)",
        "target",
    ]
    title = (
        "`bench_zero.py`, 2 ranks x 1 thread, ours through shared memory, torch's over Gloo, "
        "median step of fresh processes in pairs:\n\n"
    )
    return title + markdown(header, rows) + measured_on(results)


if __name__ == "__main__":
    sys.exit(main())
