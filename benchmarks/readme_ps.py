"""Writes the tables of bench_ps.py, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from harness import pages
from harness.pages import Blocks, Json, Rows

_SIDES = ("ours", "rpc", "gloo")


def _rows(results: Json) -> Rows:
    for size, found in results["sizes"].items():
        us = {side: statistics.median(times) for side, times in found["times_us"].items()}
        for verb in ("pull", "push"):
            row = {"size": size, "verb": verb, "ratio": found["ratios_to_rpc"][f"ours {verb}"]}
            row |= {side: us[f"{side} {verb}"] for side in _SIDES}
            yield {**row, "bound": us["ours pull, bound"], "copy": us["copy"]}


def _where_pulled(key: str) -> Callable[[Json], str]:
    return lambda row: f"{row[key]:.1f}" if row["verb"] == "pull" else ""


def _times_faster(row: Json) -> str:
    slow, fast = (1 / one for one in reversed(row["ratio"]["quartiles"]))
    return f"{1 / row['ratio']['median']:.1f}x ({slow:.1f} to {fast:.1f})"


MESSAGES = pages.Table(
    "`bench_ps.py`: pull and push of a module's parameters, in us per call, two processes of one "
    "thread each, beside torch RPC (TensorPipe) and Gloo's send and recv. A push of these only "
    "moves bytes, while one of ours applies SGD before it returns:",
    {
        "": "{verb}, {size}",
        "trireme, ssp": "{ours:.1f}",
        "trireme, bound (bsp)": _where_pulled("bound"),
        "torch RPC": "{rpc:.1f}",
        "Gloo": "{gloo:.1f}",
        "one copy": _where_pulled("copy"),
        "faster than RPC (quartiles)": _times_faster,
        "target": lambda row: f"{1 / row['ratio']['target']:.3g}x: {row['ratio']['verdict']}",
    },
    _rows,
)


def ps_tables(results: Json) -> Blocks:
    """Yields what was measured."""
    yield from MESSAGES(results)
    yield pages.measured_on(results)
