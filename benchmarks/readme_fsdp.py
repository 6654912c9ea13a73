"""Writes the tables of bench_fsdp.py, of bench_hosts.py and those that compare all strategies."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter

from harness import pages
from harness.pages import Blocks, Columns, Json, Rows
from readme_contests import HOST_MEMORY, RATIO, TARGET, contest_table, phases, step_of

Cells = Mapping[tuple[str, str], str]  # by titles of line and column

# Benchmarks call a strategy by these labels; where there are several, the fastest one counts.
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
FILES = ("fsdp", "zero", "ddp_shm", "dp")  # the first one that measured a strategy counts

FSDP_TITLE = (
    "`bench_fsdp.py`, each block a unit, 2 ranks x 1 thread, ours through shared memory, torch's "
    "over Gloo, median step of fresh processes in paired rounds:"
)
FSDP_SIDES = {"measured against": step_of("theirs"), "trireme fully_shard": step_of("ours")}
CONTESTS = contest_table(FSDP_TITLE, FSDP_SIDES)
FSDP_AGAINST_TORCH = contest_table(FSDP_TITLE, FSDP_SIDES, against="torch")
GATHERED_CONTESTS = contest_table(
    "\n`bench_fsdp.py --path all-gather`, 2 ranks x 1 thread, both over Gloo, median step of fresh "
    "processes in paired rounds:",
    {"torch FSDP2, its best": step_of("theirs"), "trireme fully_shard": step_of("ours")},
)
ENGINE = {
    "64 units of 4 small parameters, ms per step": "{label}",
    "bare": "{bare_ms:.2f}",
    "sharded": "{wrapped_ms:.2f}",
    "added": "{added_ms:.2f}",
}
MEMORY_LIMIT: Columns = {
    "": "{label}",
    "widest `mlp`": "{width}",
    "million parameters": pages.where("millions", "{millions:.0f}"),
    "MiB at its fullest moment": pages.where("peak", "{peak:.0f}"),
}
SENT: Columns = {
    "host 0 sends MB per step": "{sent_mb[0]:.1f}",
    "host 1": "{sent_mb[1]:.1f}",
    "fsdp / this": pages.where("ratio", "{ratio[median]:.2f}"),
    "target": pages.where("ratio", TARGET),
    "step ms": "{step_ms:.0f}",
}


def fsdp_tables(results: Json) -> Blocks:
    """Yields every part of bench_fsdp.py that was run."""
    yield from CONTESTS(results)
    yield from _engine(results)
    yield from _memory_limit(results)
    yield from phases(results)
    yield from HOST_MEMORY(results)


def gathered_tables(results: Json) -> Blocks:
    """Yields the contests in which ours gathers parameters, too."""
    yield from GATHERED_CONTESTS(results)
    yield from _engine(results, "Over torch's fake process group, where nothing moves:")
    yield from phases(results)


def _engine(results: Json, *title: str) -> Blocks:
    if "engine" in results:
        engine = results["engine"]
        added = {
            label: [{**run, "added_ms": run["wrapped_ms"] - run["bare_ms"]} for run in runs]
            for label, runs in engine["runs"].items()
        }
        contest = f"; {{ours}} / {{theirs}}: {RATIO}, target {TARGET}"
        ratios = "".join(map(contest.format_map, engine["contests"]))
        yield from title
        yield pages.markdown(ENGINE, pages.medians(added, ("bare_ms", "wrapped_ms", "added_ms")))
        yield f"What sharding adds to a step{ratios}."


def _memory_limit(results: Json) -> Blocks:
    if "memory_limit" in results:
        found = results["memory_limit"]
        yield (
            f"The widest `mlp` (in steps of {found['step']}) that 2 ranks build and train within "
            f"{found['limit_mib'] / 1024:g} GiB of the host, beyond what they held before:"
        )
        yield pages.markdown(MEMORY_LIMIT, _widest(found["sides"]))


def _widest(sides: Json) -> Rows:
    for label, fitting in sides.items():
        width = fitting["width"]
        millions = 16 * (width + 1) * width / 1e6 if width else None
        peak = fitting["peaks"].get(str(width))
        yield {"label": label, "width": width or "none", "millions": millions, "peak": peak}


def hosts_tables(results: Json) -> Blocks:
    """Yields what crosses the cable between two hosts."""
    yield (
        f"`bench_hosts.py`, two namespaces of one machine of {results['machine']['cores']} cores, "
        "bytes as their interfaces count them, medians of fresh processes in rounds (four ranks on "
        "those cores and a cable as fast as memory: step times say what sharding costs the CPU):"
    )
    for name, workload in results["workloads"].items():
        yield pages.markdown({f"`{name}`, 2 x 2 ranks": "{label}", **SENT}, _sent(workload))
    yield pages.measured_on(results)


def _sent(workload: Json) -> Rows:
    for label, runs in workload["runs"].items():
        yield {
            "label": label,
            "sent_mb": [statistics.median(run["sent_mb"][host] for run in runs) for host in (0, 1)],
            "ratio": workload["bytes_ratios"].get(label),
            "step_ms": pages.median_of(runs, "step_ms"),
        }


def strategy_tables(found: Json) -> Blocks:
    """Yields all strategies side by side, out of the results of several benchmarks."""
    results = [found[name] for name in FILES if name in found]
    if shares := _step_shares(results):
        yield "Step time, 2 ranks x 1 thread, torch's fastest DDP of the same run = 1:"
        yield _side_by_side(shares)
    if held := _held(results):
        yield "Bytes per parameter that a host holds between two steps, fp32 AdamW:"
        yield _side_by_side(held)
    for one in results:
        yield from _memory_limit(one)


def _side_by_side(cells: Cells) -> str:
    cases = list(dict.fromkeys(case for _, case in cells))
    rows = [
        {"": name, **{case: cells.get((name, case), "") for case in cases}}
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    return pages.markdown({case: itemgetter(case) for case in ("", *cases)}, rows)


def _step_shares(results: Sequence[Json]) -> Cells:
    """Returns the step of each strategy as a share of that of torch's DDP, by workload."""
    cells: dict[tuple[str, str], str] = {}
    for (strategy, labels), name in itertools.product(STRATEGIES.items(), WORKLOADS):
        for workload in (one["workloads"][name] for one in results if name in one["workloads"]):
            steps = pages.steps_of(workload)
            if taken := [steps[label] for label in labels if label in steps]:
                share = min(taken) / steps[workload["torch_best"]]
                cells.setdefault((strategy, name), f"{share:.2f}")
    return cells


def _held(results: Sequence[Json]) -> Cells:
    """Returns bytes per parameter, by side and by workload with ranks."""
    cells: dict[tuple[str, str], str] = {}
    for row in itertools.chain.from_iterable(one.get("memory", ()) for one in results):
        case = f"{row['workload']}, {row['ranks']} ranks"
        cells.setdefault((row["side"], case), pages.bytes_per_parameter(row))
    return cells
