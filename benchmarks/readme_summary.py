"""What a reader should know before the tables: how fast, where it loses, what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.pages import median_of
from harness.stats import NOISE

Results = Mapping[str, Any]
NO_TRAINING = ("2 ranks, no sync",)  # computes, and learns nothing from the other rank


def summary(found: Mapping[str, Results]) -> str:
    """A list of a few lines, from whichever results there are, by the names of their files."""
    lines = [
        _beside_torch(found),
        _one_process(found.get("fsdp", {})),
        _slower(found),
        _memory(found.get("fsdp", {})),
    ]
    return "".join(f"* {line}\n" for line in lines if line)


def _contests(results: Results) -> Iterator[tuple[str, str, str, float]]:
    """Workload, ours, theirs, ratio."""
    for name, workload in results.get("workloads", {}).items():
        if "step_ratio" in workload:
            yield name, "ddp", workload["torch_best"], workload["step_ratio"]["median"]
        for contest in workload.get("contests", []):
            yield name, contest["ours"], contest["theirs"], contest["ratio"]["median"]


def _beside_torch(found: Mapping[str, Results]) -> str:
    titles = {
        ("ddp_shm", "torch-ddp"): "DDP",
        ("zero", "torch-ddp"): "ZeRO 2",
        ("fsdp", "torch-ddp"): "`fully_shard`",
        ("fsdp", "torch-fsdp2"): "`fully_shard` beside torch's FSDP2",
    }
    parts = []
    for (file, theirs), title in titles.items():
        ratios = ", ".join(
            f"{ratio:.2f} ({workload})"
            for workload, _, other, ratio in _contests(found.get(file, {}))
            if other.startswith(theirs)
        )
        if ratios:
            parts.append(f"{title} {ratios}")
    if not parts:
        return ""
    return (
        "**Beside torch's DDP**, the fastest of its option sets, a step takes this part of the "
        f"time: {'; '.join(parts)}."
    )


def _one_process(results: Results) -> str:
    """Where one process with as many threads is faster than all ranks that train."""
    parts = []
    for name, workload in results.get("workloads", {}).items():
        steps = {label: median_of(runs, "step_ms") for label, runs in workload["runs"].items()}
        alone = steps.pop("1 process", None)
        for label in NO_TRAINING:
            steps.pop(label, None)
        if alone is None or not steps:
            continue
        best = min(steps, key=lambda label: steps[label])
        if alone < steps[best]:
            parts.append(f"`{name}` {alone:.0f} ms, the best ranks {steps[best]:.0f} ({best})")
    if not parts:
        return ""
    threads = results["machine"]["cores"]
    return (
        f"**One process with {threads} threads is faster than any data-parallel run** on this "
        f"machine: {'; '.join(parts)}. Ranks are for more cores or hosts than one process uses "
        "well."
    )


def _slower(found: Mapping[str, Results]) -> str:
    parts = []
    for file, results in sorted(found.items()):
        for name, ours, theirs, ratio in _contests(results):
            if ratio > 1 and not file.startswith("compare"):
                parts.append(f"{ours} on `{name}` {ratio:.2f} of {theirs}")
    for device, rows in found.get("optimizers", {}).get("devices", {}).items():
        for name, row in rows.items():
            if (ratio := row["time_ratio"]["median"]) > 1 + NOISE:
                parts.append(f"`trireme.optim`, {name} ({device}) {ratio:.2f} of torch's fused")
    return f"**Slower than what it is measured against**: {'; '.join(parts)}." if parts else ""


def _memory(results: Results) -> str:
    """Between steps and after a backward, beside torch's FSDP2."""
    held = {(row["workload"], row["ranks"], row["side"]): row for row in results.get("memory", [])}
    parts = []
    for (workload, ranks, side), row in held.items():
        torchs = held.get((workload, ranks, "torch-fsdp2"))
        if side == "fsdp" and torchs is not None:
            parts.append(
                f"`{workload}` at {ranks} ranks {row['between_steps']:.0f} against "
                f"{torchs['between_steps']:.0f} MiB (after a backward {row['after_backward']:.0f} "
                f"against {torchs['after_backward']:.0f})"
            )
    if not parts:
        return ""
    title = "**Memory of a host between steps, `fully_shard` against torch's FSDP2**"
    return f"{title}: {', '.join(parts)}."
