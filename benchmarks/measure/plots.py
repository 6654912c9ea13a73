"""The pictures of a comparison. A strategy keeps its colour, whichever others are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from measure.strategies import STRATEGIES
from measure.summary import KINDS, PHASES, Summary

PHASE_LOOKS = (
    ("forward", "#4c78a8"),
    ("backward", "#72b7b2"),
    ("exposed communication", "#e45756"),
    ("optimizer", "#eeca3b"),
)
KIND_LOOKS = (
    ("interpreters, libraries, data", "#bab0ac"),
    ("parameters", "#4c78a8"),
    ("gradients", "#e45756"),
    ("optimizer state", "#eeca3b"),
    ("buckets, allocator, rest", "#72b7b2"),
)
LAST_WIDTH, WIDER_BY = 1.5, 1.2  # in points, for curves
DPI = 150
LOGARITHMIC_FROM = 20


def draw(summaries: Sequence[Summary], caption: str, folder: Path) -> list[Path]:
    """Writes step_time.png, memory.png and loss.png into `folder` and returns their paths."""
    pictures: dict[str, Callable[[], Figure]] = {
        "step_time.png": lambda: _step_time(summaries),
        "memory.png": lambda: _memory(summaries),
        "loss.png": lambda: _loss(summaries),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in pictures.items():
        figure = picture()
        figure.supxlabel(caption, fontsize=8, color="#666666")
        figure.savefig(folder / name, dpi=DPI)
        plt.close(figure)
        paths.append(folder / name)
    return paths


def _step_time(summaries: Sequence[Summary]) -> Figure:
    figure, axes = _bars_figure(summaries)
    stacks = [[s.phase_ms[phase] for s in summaries] for phase in PHASES]
    _stack(axes, summaries, stacks, PHASE_LOOKS)
    axes.set_xlabel("milliseconds per step (median)")
    axes.set_title("Where a training step spends its time")
    return figure


def _memory(summaries: Sequence[Summary]) -> Figure:
    figure, axes = _bars_figure(summaries)
    stacks = [[s.memory_mib[kind] for s in summaries] for kind in KINDS]
    _stack(axes, summaries, stacks, KIND_LOOKS)
    axes.set_xlabel("MiB of all ranks after a backward, what they share counted once")
    axes.set_title("What the host holds in memory")
    return figure


def _bars_figure(summaries: Sequence[Summary]) -> tuple[Figure, Axes]:
    height = 2.2 + 0.55 * len(summaries)
    return plt.subplots(figsize=(9, height), layout="constrained")


def _stack(
    axes: Axes,
    summaries: Sequence[Summary],
    stacks: list[list[float]],
    legend: Sequence[tuple[str, str]],
) -> None:
    """Horizontal stacked bars, one per run, from the top down, each with its total at the end."""
    places = list(range(len(summaries)))
    left = [0.0] * len(summaries)
    for values, (label, colour) in zip(stacks, legend, strict=True):
        axes.barh(places, values, left=left, height=0.62, label=label, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, total in zip(places, left, strict=True):
        axes.text(total, place, f" {total:,.0f}", va="center")
    axes.set_yticks(places, [f"{s.strategy}\n{_shape(s)}" for s in summaries])
    axes.invert_yaxis()
    axes.set_xlim(right=max(left) * 1.1)
    axes.spines[["top", "right"]].set_visible(False)
    handles = axes.get_legend_handles_labels()[0]
    axes.figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=len(legend),
        frameon=False,
        fontsize="small",  # else five labels are wider than the picture
    )


def _loss(summaries: Sequence[Summary]) -> Figure:
    """Curves that agree lie on each other, so earlier ones are wider and show on both sides."""
    figure, (by_step, by_time) = plt.subplots(
        1, 2, figsize=(11, 4.4), sharey=True, layout="constrained"
    )
    for number, summary in enumerate(summaries):
        style = {
            "color": _colour(summary.strategy),
            "linewidth": LAST_WIDTH + WIDER_BY * (len(summaries) - 1 - number),
            "alpha": 0.45 if number == 0 else 0.9,
            "label": summary.strategy,
        }
        by_step.plot(range(1, len(summary.losses) + 1), summary.losses, **style)
        by_time.plot(summary.seconds, summary.losses, **style)
    by_step.set_xlabel("steps")
    by_step.set_ylabel("training loss of the global batch")
    by_time.set_xlabel("seconds of training")
    losses = [loss for summary in summaries for loss in summary.losses]
    if max(losses) > LOGARITHMIC_FROM * min(losses) > 0:
        by_step.set_yscale("log")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle("Loss over steps and over time")
    return figure


def _shape(summary: Summary) -> str:
    ranks = f"{summary.world} rank" + ("s" if summary.world > 1 else "")
    return f"{ranks} x {summary.threads} thread" + ("s" if summary.threads > 1 else "")


def _colour(strategy: str) -> tuple[float, float, float, float]:
    return plt.get_cmap("tab20")(list(STRATEGIES).index(strategy) % 20)
