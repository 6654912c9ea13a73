"""The tables of bench_checkpoint.py, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from harness.pages import markdown, measured_on

Results = Mapping[str, Any]
TITLES = {
    "warm": "all files in the page cache",
    "cold": "nothing in the page cache",
}


def checkpoint_tables(results: Results) -> str:
    """Every part that was run."""
    model = results["model"]
    text = (
        f"\n`bench_checkpoint.py`, {results['machine']['cores']} cores, "
        f"{model['checkpoint_mib'] / 1024:.1f} GiB: {model['units']} units of "
        f"{model['unit_mib']:.0f} MiB with the state of AdamW, medians of fresh processes in "
        "rounds.\n"
    )
    for part, title in TITLES.items():
        if part in results:
            text += f"\n{title.capitalize()}:\n\n" + _speeds(results[part], model)
    if "memory" in results:
        text += "\nMemory of the host at the fullest moment of a load, beyond the final state:\n\n"
        text += _memory(results["memory"])
    return text + measured_on(results) + "\n"


def _speeds(found: Results, model: Results) -> str:
    gb = model["checkpoint_mib"] * 2**20 / 1e9
    copy = statistics.median(found["copy_s"])
    rows = [["a copy of the files", "", "", f"{copy:.2f}", f"{gb / copy:.2f}", "", ""]]
    for side in found["sides"]:
        seconds = statistics.median(run["seconds"] for run in side["runs"])
        verdict = ""
        if ratio := side.get("ratio"):
            verdict = f"{1 / ratio['target']:.0%}: {ratio['verdict']}"
        rows.append(
            [
                side["label"],
                str(side["saved_by"]),
                str(side["ranks"]),
                f"{seconds:.2f}",
                f"{gb / seconds:.2f}",
                f"{side['share']:.0%}",
                verdict,
            ]
        )
    header = ["", "saved by ranks", "loaded by", "s", "GB/s", "of the copy's speed", "target"]
    return markdown(header, rows)


def _memory(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            row["label"],
            str(row["saved_by"]),
            str(row["ranks"]),
            f"{row['above_mib']:.1f}",
            f"{row['units']:.2f}",
            f"1: {row['verdict']}" if "verdict" in row else "",
        ]
        for row in rows
    ]
    return markdown(["", "saved by ranks", "loaded by", "MiB", "units", "target"], cells)
