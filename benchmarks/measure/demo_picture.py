"""The one picture of the demo: time and memory of each run, ours and torch's side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from measure.summary import Summary
from measure.verdict import NAMES, training_mib

ALONE, OURS, TORCH = "#9a9a9a", "#2166ac", "#e08214"
LEGEND = (("one process", ALONE), ("Trireme", OURS), ("torch", TORCH))
RIVALS = {"ddp": "torch-ddp", "zero2": "torch-ddp", "fsdp": "torch-fsdp2"}
DPI = 150


def draw_demo(
    jobs: Mapping[str, Sequence[Summary]], titles: Mapping[str, str], caption: str, path: Path
) -> None:
    """One row for each job, named by `titles`: on the left step times, on the right memory."""
    height = 1.6 + sum(0.7 + 0.36 * len(summaries) for summaries in jobs.values())
    figure, rows = plt.subplots(
        len(jobs),
        2,
        figsize=(12, height),
        width_ratios=(3, 2),
        layout="constrained",
        squeeze=False,
    )
    for (job, summaries), (time, memory) in zip(jobs.items(), rows, strict=True):
        _times(time, summaries)
        time.set_title(titles[job], loc="left", fontsize=11, fontweight="bold")
        _memory(memory, summaries)
    title = "A training step: DP, DDP, ZeRO 2 and FSDP beside torch's"
    figure.suptitle(title, x=0.01, ha="left", fontsize=14)
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in LEGEND],
        loc="outside upper right",
        ncols=len(LEGEND),
        frameon=False,
    )
    figure.supxlabel(caption, fontsize=8, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _times(axes: Axes, summaries: Sequence[Summary]) -> None:
    median = {s.strategy: s.step_ms["median"] for s in summaries}
    notes = [f"{ms:,.0f} ms{_beside(name, median)}" for name, ms in median.items()]
    ends = [s.step_ms["p90"] for s in summaries]
    _bars(axes, summaries, list(median.values()), ends, notes)
    low = [s.step_ms["median"] - s.step_ms["p10"] for s in summaries]
    high = [s.step_ms["p90"] - s.step_ms["median"] for s in summaries]
    axes.errorbar(
        list(median.values()),
        range(len(summaries)),
        xerr=[low, high],
        fmt="none",
        ecolor="#333333",
        elinewidth=0.8,
    )
    axes.set_xlabel("ms per step (median; the line is p10 to p90)")


def _beside(name: str, median: Mapping[str, float]) -> str:
    rival = RIVALS.get(name, "")
    return f"  ({median[name] / median[rival]:.2f} of {NAMES[rival]})" if rival in median else ""


def _memory(axes: Axes, summaries: Sequence[Summary]) -> None:
    held = [training_mib(s) for s in summaries]
    _bars(axes, summaries, held, held, [f"{mib:,.0f} MiB" for mib in held])
    axes.set_xlabel("MiB of all ranks, without interpreters and libraries")
    axes.set_yticklabels([])


def _bars(
    axes: Axes,
    summaries: Sequence[Summary],
    values: Sequence[float],
    ends: Sequence[float],
    notes: Sequence[str],
) -> None:
    """One bar per run from the top down; `notes` begin right of `ends`."""
    places = range(len(summaries))
    axes.barh(places, values, height=0.68, color=[_colour(s.strategy) for s in summaries])
    for place, end, note in zip(places, ends, notes, strict=True):
        axes.annotate(
            note, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(places, [_label(s) for s in summaries])
    axes.invert_yaxis()
    axes.set_xlim(0, max(ends) * 1.35)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(strategy: str) -> str:
    if strategy == "single":
        return ALONE
    return TORCH if strategy.startswith("torch") else OURS


def _label(summary: Summary) -> str:
    if summary.strategy == "single":
        return f"one process, {summary.threads} threads"
    name = NAMES[summary.strategy]
    if summary.world == 1:
        return f"{name}, {summary.threads} replicas"
    return f"{name}, {summary.world} ranks"
