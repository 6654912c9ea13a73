"""Writes what a reader should know before the tables: how fast, where it loses, what it holds."""

from __future__ import annotations

from collections.abc import Iterator

from harness import pages
from harness.pages import Blocks, Json
from harness.stats import NOISE
from readme_contests import contests

BESIDE_TORCH = {
    ("ddp_shm", "torch-ddp"): "DDP",
    ("zero", "torch-ddp"): "ZeRO 2",
    ("fsdp", "torch-ddp"): "`fully_shard`",
    ("fsdp", "torch-fsdp2"): "`fully_shard` beside torch's FSDP2",
}


def summary(found: Json) -> Blocks:
    """Yields a list of a few lines, from whichever files of results there are."""
    fsdp = found.get("fsdp", {})
    lines = {
        "**Beside torch's DDP**, the fastest of its option sets, a step takes this part of the "
        "time: {cases}.": _beside_torch(found),
        "**One process with {machine[cores]} threads is faster than any data-parallel run** on "
        "this machine: {cases}. Ranks are for more cores or hosts than one process uses "
        "well.": _one_process(fsdp),
        "**Slower than what it is measured against**: {cases}.": _slower(found),
        "**Memory of a host between steps, `fully_shard` against torch's FSDP2**: "
        "{cases}.": _memory(fsdp),
    }
    yield "\n".join(
        "* " + line.format_map({**fsdp, "cases": cases})
        for line, parts in lines.items()
        if (cases := "; ".join(parts))
    )


def _beside_torch(found: Json) -> Iterator[str]:
    for (file, theirs), title in BESIDE_TORCH.items():
        ratios = [
            "{ratio[median]:.2f} ({workload})".format_map(contest)
            for contest in contests(found.get(file, {}), theirs)
        ]
        if ratios:
            yield f"{title} {', '.join(ratios)}"


def _one_process(results: Json) -> Iterator[str]:
    """Yields where one process with as many threads is faster than all ranks that train."""
    for name, workload in results.get("workloads", {}).items():
        steps = pages.steps_of(workload)
        steps.pop("2 ranks, no sync", None)  # computes, and learns nothing from the other rank
        alone = steps.pop("1 process", None)
        best = min(steps, key=lambda label: steps[label], default=None)
        if alone is not None and best is not None and alone < steps[best]:
            yield f"`{name}` {alone:.0f} ms, the best ranks {steps[best]:.0f} ({best})"


def _slower(found: Json) -> Iterator[str]:
    for _, results in sorted(found.items()):
        for contest in contests(results):
            if contest["ratio"]["median"] > 1:
                yield "{ours} on `{workload}` {ratio[median]:.2f} of {theirs}".format_map(contest)
    for device, rows in found.get("optimizers", {}).get("devices", {}).items():
        for name, row in rows.items():
            if (ratio := row["time_ratio"]["median"]) > 1 + NOISE:
                yield f"`trireme.optim`, {name} ({device}) {ratio:.2f} of torch's fused"


def _memory(results: Json) -> Iterator[str]:
    """Yields memory between steps and after a backward, beside torch's FSDP2."""
    held = {(row["side"], row["workload"], row["ranks"]): row for row in results.get("memory", ())}
    yield ", ".join(
        f"`{workload}` at {ranks} ranks {ours['between_steps']:.0f} against "
        f"{torchs['between_steps']:.0f} MiB (after a backward {ours['after_backward']:.0f} "
        f"against {torchs['after_backward']:.0f})"
        for (side, workload, ranks), ours in held.items()
        if side == "fsdp" and (torchs := held.get(("torch-fsdp2", workload, ranks)))
    )
