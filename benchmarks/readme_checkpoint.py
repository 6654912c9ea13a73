"""Declares the tables of bench_checkpoint.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from readme_tables import Blocks, Json, Rows, Table, every

LOADS = "= {label} | saved by ranks = {saved_by} | loaded by = {ranks}"
SPEEDS = LOADS + " | s = {s:.2f} | GB/s = {speed:.2f} | of the copy's speed = {share:.0%}"


def _what(results: Json) -> Blocks:
    model = results["model"]
    yield (
        f"`bench_checkpoint.py`, {results['machine']['cores']} cores, "
        f"{model['checkpoint_mib'] / 1024:.1f} GiB: {model['units']} units of "
        f"{model['unit_mib']:.0f} MiB with the state of AdamW, medians of fresh processes in "
        "rounds."
    )


def _speeds(part: str) -> Callable[[Json], Rows]:
    def rows(results: Json) -> Rows:
        if part in results:
            copies = [{"seconds": seconds} for seconds in results[part]["copy_s"]]
            copy = {"label": "a copy of the files", "saved_by": "", "ranks": "", "runs": copies}
            for side in (copy, *results[part]["sides"]):
                seconds = statistics.median(run["seconds"] for run in side["runs"])
                gb = results["model"]["checkpoint_mib"] * 2**20 / 1e9
                yield {**side, "s": seconds, "speed": gb / seconds}

    return rows


WARM = Table(_speeds("warm"), "All files in the page cache:", SPEEDS)
COLD = Table(_speeds("cold"), "Nothing in the page cache:", SPEEDS)
MEMORY = Table(
    "memory",
    "Memory of the host at the fullest moment of a load, beyond the final state:",
    LOADS + " | MiB = {above_mib:.1f} | units = {units:.2f}",
)
checkpoint_tables = every(_what, WARM, COLD, MEMORY)
