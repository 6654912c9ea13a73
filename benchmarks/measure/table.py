"""Aligned plain-text tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from measure.summary import Summary


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is set flush left, the others flush right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell for cell in cells)
        padded = [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
        return "  ".join([first.ljust(widths[0]), *padded]).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def comparison(summaries: Sequence[Summary], reference: str, unit: str) -> str:
    """One row per run; the ratio is of median step times, below 1 is faster than `reference`."""
    base = next(s for s in summaries if s.strategy == reference).step_ms["median"]
    header = [
        "strategy",
        "ranks x threads",
        "step ms",
        "p10 - p90",
        f"{unit}/s",
        f"vs {reference}",
        "exposed comm",
        "peak MiB/rank",
        "host MiB",
        "final loss",
    ]
    return table(header, [_row(summary, base) for summary in summaries])


def _row(summary: Summary, base: float) -> list[str]:
    median, low, high = (summary.step_ms[key] for key in ("median", "p10", "p90"))
    exposed = f"{summary.exposed_comm_ms / median:.1%}" if summary.world > 1 else "-"
    return [
        summary.strategy,
        f"{summary.world} x {summary.threads}",
        f"{median:.1f}",
        f"{low:.1f} - {high:.1f}",
        f"{summary.samples_per_s:.1f}",
        f"{median / base:.3f}",
        exposed,
        f"{summary.peak_rss_mib_per_rank:.0f}",
        f"{summary.pss_mib_host:.0f}",
        f"{summary.final_loss:.4f}",
    ]


def print_times(title: str, times: Mapping[str, Sequence[float]], notes: Mapping[str, str]) -> None:
    """Prints microseconds per call by side, one entry per round; `notes` stand beside sides."""
    rows = [
        [
            side,
            f"{statistics.median(found):.1f}",
            f"{min(found):.1f}",
            f"{max(found):.1f}",
            notes.get(side, ""),
        ]
        for side, found in times.items()
    ]
    print(f"{title}, us per call")
    print(table(["", "median", "least", "most", ""], rows), "\n", flush=True)
