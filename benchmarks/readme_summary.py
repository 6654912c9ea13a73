"""Writes what a reader should know before the tables: how fast, where it loses, what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from measure.stats import NOISE
from readme_costs import memory_rows
from readme_steps import contests, met_often
from readme_tables import Blocks, Json, markdown

BESIDE_TORCH = {
    "DDP / torch's DDP": ("ddp", "torch-ddp"),
    "ZeRO 2 / torch's DDP": ("zero2", "torch-ddp"),
    "`fully_shard` / torch's DDP": ("fsdp", "torch-ddp"),
    "`fully_shard` / torch's FSDP2": ("fsdp", "torch-fsdp2"),
}
NO_RANKS = ("1 process", "no sync")  # the second computes, and learns nothing


def lead(found: Json) -> Blocks:
    """Yields README's list of a few lines, from whichever files of results there are."""
    steps = found.get("steps", {})
    yield _list(
        steps,
        {
            "**2 ranks show {cases}**: they share the {machine[cores]} cores that one process has "
            "for itself.": iter(["what each strategy costs"] if steps else []),
            "**One process with {machine[cores]} threads is faster than ranks** where layers are "
            "large: {cases}. Ranks are for more cores or hosts than one process uses "
            "well.": _one_process(steps, wins=True),
            "**Ranks are faster than one process** with as many threads: {cases}.": _one_process(
                steps, wins=False
            ),
            "**When a rank is killed**, the others have raised within {cases}.": _killed(
                found.get("faults", {})
            ),
        },
    )


def summary(found: Json) -> Blocks:
    """Yields ratios to torch, what README says, where we lose, and what a host holds."""
    yield from beside_torch(found.get("steps", {}))
    yield from lead(found)
    yield _list(
        found,
        {
            "**Slower than what it is measured against**: {cases}.": _slower(found),
            "**Memory of a host between steps, `fully_shard` against torch's FSDP2**: "
            "{cases}.": _memory(found.get("memory", {})),
        },
    )


def beside_torch(results: Json) -> Blocks:
    """Yields a small table of ratios to torch's classes, each with its fastest options."""
    rows = {
        title: {
            contest["workload"]: contest["ratio"]["median"]
            for contest in contests(results, ours, theirs)
            if "Gloo" not in contest["ours"]
        }
        for title, (ours, theirs) in BESIDE_TORCH.items()
    }
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    if names:
        cells = " | ".join(f"`{name}` = {{{name}:.2f}}" for name in names)
        yield "Time of a step beside torch's, with the fastest of torch's option sets:"
        yield markdown("= {title} | " + cells, ({"title": t, **row} for t, row in rows.items()))


def _list(results: Json, lines: Mapping[str, Iterator[str]]) -> str:
    """Returns the lines for which there are cases."""
    return "\n".join(
        "* " + line.format_map({**results, "cases": cases})
        for line, parts in lines.items()
        if (cases := "; ".join(parts))
    )


def _one_process(results: Json, *, wins: bool) -> Iterator[str]:
    """Yields where one process with as many threads is faster, or slower, than ranks that train.

    What lies within the noise is neither.
    """
    for name, workload in results.get("workloads", {}).items():
        steps = dict(met_often(workload))
        ranks = {label: ms for label, ms in steps.items() if label not in (*NO_RANKS, "dp")}
        best = min(ranks, key=lambda label: ranks[label], default=None)
        alone = steps.get("1 process")
        if best is None or alone is None:
            continue
        faster, slower = (alone, ranks[best]) if wins else (ranks[best], alone)
        if faster * (1 + NOISE) < slower:
            yield f"`{name}` {alone:.0f} ms, the best ranks {ranks[best]:.0f} ({best})"


def _killed(results: Json) -> Iterator[str]:
    """Yields the longest that any rank went on without knowing of a death."""
    worst: dict[int, float] = {}
    for case in results.get("cases", ()):
        if case["kind"].startswith("killed"):
            worst[case["ranks"]] = max(worst.get(case["ranks"], 0.0), case["max_ms"])
    each = ", ".join(f"{most:.0f} ms at {ranks} ranks" for ranks, most in sorted(worst.items()))
    if each:
        yield f"{each} (the most in {results['tries']} tries of each kind)"


def _slower(found: Json) -> Iterator[str]:
    for contest in contests(found.get("steps", {})):
        if contest["ratio"]["median"] > 1:
            yield "{ours} on `{workload}` {ratio[median]:.2f} of {theirs}".format_map(contest)
    for device, rows in found.get("optimizers", {}).get("devices", {}).items():
        for name, row in rows.items():
            if (ratio := row["time_ratio"]["median"]) > 1 + NOISE:
                yield f"`trireme.optim`, {name} ({device}) {ratio:.2f} of torch's fused"


def _memory(results: Json) -> Iterator[str]:
    """Yields memory between steps and after a backward, beside torch's FSDP2."""
    held = {(row["side"], row["workload"], row["ranks"]): row for row in memory_rows(results)}
    yield ", ".join(
        f"`{workload}` at {ranks} ranks {ours['between_steps']:.0f} against "
        f"{torchs['between_steps']:.0f} MiB (after a backward {ours['after_backward']:.0f} "
        f"against {torchs['after_backward']:.0f})"
        for (side, workload, ranks), ours in held.items()
        if side == "fsdp" and (torchs := held.get(("torch-fsdp2", workload, ranks)))
    )
