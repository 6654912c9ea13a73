"""Medians, percentiles, paired ratios and the verdict on a target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

NOISE = 0.03


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, linear between neighbours."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, as the JSON carries them."""
    return {
        "median": statistics.median(values),
        "p10": percentile(values, 0.1),
        "p90": percentile(values, 0.9),
    }


@dataclass(frozen=True)
class PairedRatio:
    """Ratios ours / theirs of runs made side by side, against a target not to be passed."""

    ratios: list[float]
    target: float
    median: float
    quartiles: tuple[float, float]
    verdict: str

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float], target: float) -> PairedRatio:
        """`ours[i]` and `theirs[i]` were measured as pair i."""
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        median = statistics.median(ratios)
        quartiles = (percentile(ratios, 0.25), percentile(ratios, 0.75))
        return cls(ratios, target, median, quartiles, verdict(median, target))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Every ratio, then median, interquartile range and verdict."""
        low, high = self.quartiles
        return [
            "ratios " + "  ".join(f"{ratio:.3f}" for ratio in self.ratios),
            f"median {self.median:.3f}, interquartile {low:.3f} to {high:.3f}, "
            f"target <= {self.target:g}: {self.verdict}",
        ]


def verdict(ratio: float, target: float) -> str:
    """`met`, `met within noise (3 %)` or `missed`."""
    if ratio <= target:
        return "met"
    if ratio <= target * (1 + NOISE):
        return f"met within noise ({100 * NOISE:.0f} %)"
    return "missed"
