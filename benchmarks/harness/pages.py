"""What the pages of several benchmarks have in common: tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Runs = Mapping[str, Sequence[Mapping[str, float]]]
PHASES_MS = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def measured_on(results: Mapping[str, Any]) -> str:
    """The line under a table: which machine, torch and commit its figures are from."""
    machine = results["machine"]
    commits = sorted({*results.get("commits", {}).values()} or {machine["commit"]})
    parts = [
        f"{machine['cores']} cores of {machine['cpu']}",
        f"torch {machine['torch']}",
        "commit " + ", ".join(commits).replace("+", " with changes"),
        *([machine["date"]] if "date" in machine else []),
        "heap warm on all sides" if "allocator" in machine else "heap as glibc leaves it",
    ]
    return "\nMeasured on " + ", ".join(parts) + ".\n"


def median_of(runs: Sequence[Mapping[str, float]], quantity: str) -> float:
    return statistics.median(run[quantity] for run in runs)


def ratio_cells(ratio: Mapping[str, Any]) -> list[str]:
    """Median with quartiles, and the target with what became of it."""
    low, high = ratio["quartiles"]
    return [
        f"{ratio['median']:.3f} ({low:.3f} to {high:.3f})",
        f"{ratio['target']:g}: {ratio['verdict']}",
    ]


def phases(runs: Runs) -> str:
    """Where the time of every side's steps goes."""
    header = ["median of fresh processes, ms", "step", "forward", "backward", "optimizer"]
    rows = [
        [label, *(f"{median_of(found, phase):.1f}" for phase in PHASES_MS)]
        for label, found in runs.items()
    ]
    return markdown(header, rows)


def host_memory(found: Sequence[Mapping[str, Any]]) -> str:
    """What harness/memory_report.py measured."""
    rows = [
        [
            row["workload"],
            row["side"],
            str(row["ranks"]),
            f"{row['between_steps']:.0f}",
            f"{row['between_steps'] * 2**20 / row['numel']:.1f}",
            f"{row['after_backward']:.0f}",
            f"{row['limit']:.0f}: {row['verdict']}" if "limit" in row else "",
            f"{row['model_states']:.1f}",
            f"{row['estimated']:.1f}",
        ]
        for row in found
    ]
    header = [
        "workload",
        "side",
        "ranks",
        "MiB between steps",
        "bytes per parameter",
        "MiB after a backward",
        "target between steps",
        "model states",
        "as estimated",
    ]
    title = (
        "Memory of a host, all ranks together (PSS), less what they held before the model was "
        "built; after a backward with what the allocator keeps of activations; model states are "
        "gradients, parameters and moments then:\n\n"
    )
    text = title + markdown(header, rows)
    left = [row for row in found if "left_by_torch" in row]
    if left:
        each = ", ".join(
            f"{row['left_by_torch']:.0f} MiB in {row['ranks']} ranks of {row['workload']}"
            for row in left
        )
        text += f"\nRanks that never talk hold more than parameters and moments, too: {each}.\n"
    return text
