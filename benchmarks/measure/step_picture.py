"""The picture at the head of README: a step of each strategy beside torch's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

OURS, TORCHS, ALONE = "#2f6db3", "#b8b8b8", "#7c7c7c"


def draw_steps(
    steps: Mapping[str, Mapping[str, float]], title: str, caption: str, figures: str, path: Path
) -> None:
    """Draws ms by workload and strategy; `figures` goes into the file, as a text to look for."""
    matplotlib.rcParams["svg.hashsalt"] = "trireme"  # else its ids are drawn anew each time
    matplotlib.rcParams["svg.fonttype"] = "none"
    figure, columns = plt.subplots(1, len(steps), figsize=(9.6, 2.7), layout="constrained")
    for axes, (workload, taken) in zip(columns, steps.items(), strict=True):
        names = [_name(strategy) for strategy in taken]
        axes.barh(names, list(taken.values()), color=[_colour(name) for name in taken], height=0.68)
        for place, value in enumerate(taken.values()):
            axes.text(value, place, f" {value:.0f}", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_title(workload, fontsize=10)
        axes.set_xlim(right=1.18 * max(taken.values()))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelsize=8)
        if axes is not columns[0]:
            axes.set_yticklabels([])
    figure.suptitle(title, fontsize=9)
    figure.supxlabel(caption, fontsize=7, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Description": figures})
    plt.close(figure)


def _name(strategy: str) -> str:
    return strategy if _is_others(strategy) else f"Trireme {strategy}"


def _colour(strategy: str) -> str:
    if strategy.startswith("1 process"):
        return ALONE
    return TORCHS if _is_others(strategy) else OURS


def _is_others(strategy: str) -> bool:
    return strategy.startswith(("torch", "1 process"))
