"""Writes the tables of bench_checkpoint.py, in Markdown."""

from __future__ import annotations

from measure import pages
from measure.pages import Blocks, Columns, Json, Rows

TITLES = {"warm": "All files in the page cache:", "cold": "Nothing in the page cache:"}
LOADS = {"": "{label}", "saved by ranks": "{saved_by}", "loaded by": "{ranks}"}
SPEEDS: Columns = {
    **LOADS,
    "s": "{seconds:.2f}",
    "GB/s": "{speed:.2f}",
    "of the copy's speed": pages.where("share", "{share:.0%}"),
    "target": pages.where("target", "{target:.0%}: {ratio[verdict]}"),
}
REACHED = pages.where("verdict", "1: {verdict}")
MEMORY = pages.Table(
    "Memory of the host at the fullest moment of a load, beyond the final state:",
    {**LOADS, "MiB": "{above_mib:.1f}", "units": "{units:.2f}", "target": REACHED},
    "memory",
)


def checkpoint_tables(results: Json) -> Blocks:
    """Yields every part that was run."""
    model = results["model"]
    gb = model["checkpoint_mib"] * 2**20 / 1e9
    yield (
        f"`bench_checkpoint.py`, {results['machine']['cores']} cores, "
        f"{model['checkpoint_mib'] / 1024:.1f} GiB: {model['units']} units of "
        f"{model['unit_mib']:.0f} MiB with the state of AdamW, medians of fresh processes in "
        "rounds."
    )
    for part, title in TITLES.items():
        if part in results:
            yield title
            yield pages.markdown(SPEEDS, _speeds(results[part], gb))
    yield from MEMORY(results)
    yield pages.measured_on(results)


def _speeds(found: Json, gb: float) -> Rows:
    copies = [{"seconds": seconds} for seconds in found["copy_s"]]
    copy = {"label": "a copy of the files", "saved_by": "", "ranks": "", "runs": copies}
    for side in (copy, *found["sides"]):
        seconds = pages.median_of(side["runs"], "seconds")
        target = 1 / side["ratio"]["target"] if "ratio" in side else None
        yield {**side, "seconds": seconds, "speed": gb / seconds, "target": target}
