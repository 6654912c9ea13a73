"""What a host holds under several strategies, beside its limit and what the library estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workloads import WORKLOADS, WorkloadOptions

from measure.host_memory import HostMemory
from measure.sides import Side
from measure.stats import verdict
from measure.table import table

LIMITED = ("zero2", "fsdp")  # the strategies of which the limit is asked
BYTES_PER_PARAMETER = 16  # fp32: parameter, gradient, two moments of AdamW
MARGIN = 1.10
RING_MIB = 8  # what a rank deposits its gradients in
ESTIMATE_TOLERANCE = 0.05
PEAK_RANKS = 2

REPLICAS_LIMIT = 0.75  # limits one process with replicas; our DDP holds 1

Measure = Callable[[Side, str, int], HostMemory]
MeasurePeak = Callable[[Side, str], float]
Rows = list[dict[str, Any]]


def measure_memory(
    workload: str,
    all_ranks: Sequence[int],
    sides: Sequence[tuple[Side, str | None]],
    measure: Measure,
    measure_peak: MeasurePeak,
) -> Rows:
    """Measures and prints what a host holds; returns its part of the JSON.

    `sides`: with the name under which the estimate knows what its ranks hold.
    """
    rows: Rows = []
    for ranks in all_ranks:
        for side, planned in sides:
            print(f"memory: {workload}, {side.label}, {ranks} ranks", flush=True)
            held = measure(side, workload, ranks)
            row = {"workload": workload, "ranks": ranks, "side": side.label, **held.to_json()}
            if ranks == PEAK_RANKS:
                row["peak"] = measure_peak(side, workload)
            rows.append(row | _judged(row, side, planned))
        _judge_replicas(rows)
    header = ["MiB of the host", "ranks", "between steps", "limit", "bytes/parameter"]
    header += ["after backward", "at most", "model states", "estimated"]
    print(table(header, [_cells(row) for row in rows]))
    for row in rows:
        if "limit" in row:
            share = row["between_steps"] / row["limit"]
            print(f"{_what(row)}: {share:.3f} of the limit: {row['verdict']}")
        if "left_by_torch" in row:
            print(f"{_what(row)}: {row['left_by_torch']:.1f} MiB left beside parameters, moments")
        if not row["estimate_agrees"]:
            print(
                f"[bench_memory] {_what(row)}: estimate_memory said {row['estimated']:.1f} MiB of "
                f"model states, expected {row['model_states']:.1f} within "
                f"{ESTIMATE_TOLERANCE:.0%}. Look at docs/memory.md."
            )
    return rows


def _judge_replicas(rows: Rows) -> None:
    """Gives DataParallel its limit: a share of what our DDP of as many ranks holds."""
    by_side = {row["side"]: row for row in rows if row["ranks"] == rows[-1]["ranks"]}
    if {"dp", "ddp"} <= by_side.keys():
        row = by_side["dp"]
        row["limit"] = REPLICAS_LIMIT * by_side["ddp"]["between_steps"]
        row["verdict"] = verdict(row["between_steps"] / row["limit"], 1.0)


def _judged(row: dict[str, Any], side: Side, planned: str | None) -> dict[str, Any]:
    """What was to be expected of `row`, and whether it is so."""
    import torch
    import trireme

    with torch.device("meta"):  # values do not matter here
        module = WORKLOADS[row["workload"]](WorkloadOptions()).model()
    if planned is None:
        return {"numel": sum(p.numel() for p in module.parameters()), "estimate_agrees": True}
    estimate = trireme.estimate_memory(module, planned, row["ranks"])
    estimated = estimate.host.model_states / 2**20
    found: dict[str, Any] = {
        "numel": estimate.numel,
        "estimated": estimated,
        "estimate_agrees": abs(estimated / row["model_states"] - 1) <= ESTIMATE_TOLERANCE,
    }
    if side.strategy in LIMITED:
        of_states = BYTES_PER_PARAMETER * estimate.numel / 2**20
        found["limit"] = MARGIN * of_states + RING_MIB * row["ranks"]
        found["verdict"] = verdict(row["between_steps"] / found["limit"], 1.0)
    if side.strategy == "no-sync":  # what any rank has: first uses of libraries, the allocator
        found["left_by_torch"] = row["between_steps"] - row["parameters"] - row["optimizer_state"]
    return found


def _what(row: dict[str, Any]) -> str:
    return f"{row['workload']}, {row['side']}, {row['ranks']} ranks"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['workload']}, {row['side']}",
        str(row["ranks"]),
        f"{row['between_steps']:.1f}",
        f"{row['limit']:.1f}" if "limit" in row else "",
        f"{row['between_steps'] * 2**20 / row['numel']:.1f}",
        *(
            f"{row[name]:.1f}" if name in row else ""
            for name in ("after_backward", "peak", "model_states", "estimated")
        ),
    ]
