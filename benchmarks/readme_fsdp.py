"""The tables of bench_fsdp.py, and those that compare all strategies, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.pages import (
    Runs,
    host_memory,
    markdown,
    measured_on,
    median_of,
    phases,
    ratio_cells,
)

Results = Mapping[str, Any]

# What each strategy is called where it was measured; of several labels the fastest one counts.
STRATEGIES: dict[str, Sequence[str]] = {
    "1 process x 2 threads": ["1 process"],
    "torch DDP": ["torch-ddp", "torch-ddp + view", "torch-ddp + view + batched"],
    "torch ZeRO-1": ["torch-zero1", "torch-zero1 + view"],
    "torch FSDP2": [
        "torch-fsdp2",
        "torch-fsdp2, kept",
        "torch-fsdp2, foreach",
        "torch-fsdp2, kept, foreach",
    ],
    "DataParallel": ["dp"],
    "DDP": ["ddp, shared memory"],
    "ZeRO 1": ["zero1"],
    "ZeRO 2": ["zero2"],
    "ZeRO 2, `trireme.optim`": ["zero2, trireme.optim"],
    "fully_shard": ["fsdp"],
    "fully_shard, `trireme.optim`": ["fsdp, trireme.optim"],
}
WORKLOADS = ("mlp", "gpt-small-batch", "gpt", "narrow")


def _contests(results: Results, against: str = "") -> list[list[str]]:
    """A row per contest with a side whose name begins so, beside what computing alone takes."""
    rows = []
    for name, workload in results["workloads"].items():
        runs = workload["runs"]
        beside = [
            f"{median_of(runs[one], 'step_ms'):.0f}" for one in ("1 process", "2 ranks, no sync")
        ]
        for contest in workload["contests"]:
            if not contest["theirs"].startswith(against):
                continue
            sides = [
                f"{median_of(runs[contest[side]], 'step_ms'):.0f} ({contest[side]})"
                for side in ("theirs", "ours")
            ]
            rows.append([name, *beside, *sides, *ratio_cells(contest["ratio"])])
    return rows


def fsdp_section(results: Results, against: str = "") -> str:
    """Who is measured against whom; of these those whose name begins so."""
    header = [
        "workload",
        "1 process x 2 threads, ms",
        "2 ranks, no sync",
        "measured against",
        "trireme fully_shard",
        "ratio (quartiles)",
        "target",
    ]
    title = (
        "`bench_fsdp.py`, each block a unit, 2 ranks x 1 thread, ours through shared memory, "
        "torch's over Gloo, median step of fresh processes in paired rounds:\n\n"
    )
    return title + markdown(header, _contests(results, against)) + measured_on(results)


def gathered_tables(results: Results) -> str:
    """Where ours gathers parameters, too."""
    header = ["workload", "1 process x 2 threads, ms", "2 ranks, no sync", "torch FSDP2, its best"]
    header += ["trireme fully_shard", "ratio (quartiles)", "target"]
    title = (
        "\n`bench_fsdp.py --path all-gather`, 2 ranks x 1 thread, both over Gloo, median step of "
        "fresh processes in paired rounds:\n\n"
    )
    parts = [title + markdown(header, _contests(results)) + measured_on(results)]
    if "engine" in results:
        parts.append("Over torch's fake process group, where nothing moves:\n\n")
        parts[-1] += _engine(results["engine"])
    for name, workload in results["workloads"].items():
        parts.append(f"`{name}`:\n\n" + phases(workload["runs"]))
    return "\n".join(parts)


def hosts_tables(results: Results) -> str:
    """What crosses the cable between two hosts."""
    parts = []
    for name, workload in results["workloads"].items():
        rows = []
        for label, runs in workload["runs"].items():
            sent = [statistics.median(run["sent_mb"][host] for run in runs) for host in (0, 1)]
            ratio = workload["bytes_ratios"].get(label)
            rows.append(
                [
                    label,
                    *(f"{mb:.1f}" for mb in sent),
                    f"{ratio['median']:.2f}" if ratio else "",
                    f"{ratio['target']:g}: {ratio['verdict']}" if ratio else "",
                    f"{median_of(runs, 'step_ms'):.0f}",
                ]
            )
        header = [f"`{name}`, 2 x 2 ranks", "host 0 sends MB per step", "host 1"]
        header += ["fsdp / this", "target", "step ms"]
        parts.append(markdown(header, rows))
    title = (
        f"\n`bench_hosts.py`, two namespaces of one machine of {results['machine']['cores']} "
        "cores, bytes as their interfaces count them, medians of fresh processes in rounds (four "
        "ranks on those cores and a cable as fast as memory: step times say what sharding costs "
        "the CPU):"
        "\n\n"
    )
    return title + "\n".join(parts) + measured_on(results) + "\n"


def fsdp_tables(results: Results) -> str:
    """Every part of bench_fsdp.py that was run."""
    parts = []
    if results["workloads"]:
        parts.append(fsdp_section(results))
    if "engine" in results:
        parts.append(_engine(results["engine"]))
    if "memory_limit" in results:
        parts.append(_memory_limit(results["memory_limit"]))
    for name, workload in results["workloads"].items():
        parts.append(f"`{name}`:\n\n" + phases(workload["runs"]))
    if "memory" in results:
        parts.append(host_memory(results["memory"]))
    return "\n" + "\n".join(parts) + "\n"


def strategy_tables(results: Sequence[Results]) -> str:
    """All strategies side by side, out of the results of several benchmarks; the first one that
    measured a strategy says how fast it is."""
    parts = []
    measured = {name for found in results for name in found.get("workloads", {})}
    workloads = [name for name in WORKLOADS if name in measured]
    rows = [
        [title, *(_of_torch_ddp(results, name, labels) for name in workloads)]
        for title, labels in STRATEGIES.items()
    ]
    if any(cell for row in rows for cell in row[1:]):
        title = "Step time, 2 ranks x 1 thread, torch's fastest DDP of the same run = 1:\n\n"
        parts.append(title + markdown(["", *workloads], [row for row in rows if any(row[1:])]))
    if held := _bytes_per_parameter(results):
        parts.append(held)
    for found in results:
        if "memory_limit" in found:
            parts.append(_memory_limit(found["memory_limit"]))
    return "\n" + "\n".join(parts or ["No run is committed yet.\n"]) + "\n"


def _of_torch_ddp(results: Sequence[Results], workload: str, labels: Sequence[str]) -> str:
    for found in results:
        measured = found.get("workloads", {}).get(workload)
        if measured is not None and (step := _fastest(measured["runs"], labels)) is not None:
            return f"{step / median_of(measured['runs'][measured['torch_best']], 'step_ms'):.2f}"
    return ""


def _fastest(runs: Runs, labels: Sequence[str]) -> float | None:
    steps = [median_of(runs[label], "step_ms") for label in labels if label in runs]
    return min(steps, default=None)


def _bytes_per_parameter(results: Sequence[Results]) -> str:
    cells: dict[str, dict[str, str]] = {}
    for row in _memory_rows(results):
        case = f"{row['workload']}, {row['ranks']} ranks"
        held = row["between_steps"] * 2**20 / row["numel"]
        cells.setdefault(row["side"], {}).setdefault(case, f"{held:.1f}")
    cases = list(dict.fromkeys(case for found in cells.values() for case in found))
    rows = [[side, *(found.get(case, "") for case in cases)] for side, found in cells.items()]
    title = "Bytes per parameter that a host holds between two steps, fp32 AdamW:\n\n"
    return title + markdown(["", *cases], rows) if rows else ""


def _memory_rows(results: Sequence[Results]) -> Iterator[Mapping[str, Any]]:
    for found in results:
        yield from found.get("memory", [])


def _engine(engine: Mapping[str, Any]) -> str:
    rows = []
    for label, runs in engine["runs"].items():
        added = [{**run, "added_ms": run["wrapped_ms"] - run["bare_ms"]} for run in runs]
        names = ("bare_ms", "wrapped_ms", "added_ms")
        rows.append([label, *(f"{median_of(added, name):.2f}" for name in names)])
    header = ["64 units of 4 small parameters, ms per step", "bare", "sharded", "added"]
    text = markdown(header, rows) + "\nWhat sharding adds to a step"
    for contest in engine["contests"]:
        ratio, target = ratio_cells(contest["ratio"])
        text += f"; {contest['ours']} / {contest['theirs']}: {ratio}, target {target}"
    return text + ".\n"


def _memory_limit(found: Mapping[str, Any]) -> str:
    rows = []
    for label, fitting in found["sides"].items():
        width = fitting["width"]
        millions = f"{16 * (width + 1) * width / 1e6:.0f}" if width else ""
        peak = f"{fitting['peaks'][str(width)]:.0f}" if width else ""
        rows.append([label, str(width or "none"), millions, peak])
    header = ["", "widest `mlp`", "million parameters", "MiB at its fullest moment"]
    title = (
        f"The widest `mlp` (in steps of {found['step']}) that 2 ranks build and train within "
        f"{found['limit_mib'] / 1024:g} GiB of the host, beyond what they held before:\n\n"
    )
    return title + markdown(header, rows)
