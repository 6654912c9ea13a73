"""Writes the tables of bench_ps.py, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from measure import pages
from measure.pages import Blocks, Json, Rows
from readme_steps import RATIO, TARGET

_SIDES = ("ours", "rpc", "gloo")


def _rows(results: Json) -> Rows:
    for size, found in results.get("sizes", {}).items():
        us = {side: statistics.median(times) for side, times in found["times_us"].items()}
        for verb in ("pull", "push"):
            row = {"size": size, "verb": verb, "ratio": found["ratios_to_rpc"][f"ours {verb}"]}
            row |= {side: us[f"{side} {verb}"] for side in _SIDES}
            yield {**row, "bound": us["ours pull, bound"], "copy": us["copy"]}


def _where_pulled(key: str) -> Callable[[Json], str]:
    return lambda row: f"{row[key]:.1f}" if row["verb"] == "pull" else ""


def _times_faster(row: Json) -> str:
    slow, fast = (1 / quartile for quartile in reversed(row["ratio"]["quartiles"]))
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


def _row_sides(results: Json) -> Rows:
    found = results.get("sparse")
    for side, times in found["times_us"].items() if found else ():
        us = statistics.median(times)
        row = {"side": side, "us": us, "rows_per_us": found["ids"] / us}
        yield {**row, "ratio": found["ratios_to_torch"].get(side)}


def _share_of_torch(row: Json) -> str:
    ratio = row["ratio"]
    if ratio is None:
        return ""
    return f"{1 / ratio['median']:.0%}, target {1 / ratio['target']:.0%}: {ratio['verdict']}"


ROWS = pages.Table(
    "Rows of a sparse table on one core: {sparse[ids]} ids a call out of {sparse[rows]} rows of "
    "{sparse[dim]} fp32, beside torch's gather (`index_select`) and scatter (`index_add_`) in one "
    "tensor:",
    {
        "": "{side}",
        "us per call": "{us:.0f}",
        "million rows per s": "{rows_per_us:.1f}",
        "of torch's rows per s": _share_of_torch,
    },
    _row_sides,
)


def _updates(results: Json) -> Rows:
    for row in results.get("updates", ()):
        yield {**row, "ratio": row["ratio_to_rpc"]}


UPDATES = pages.Table(
    "Steps per second that workers make together, each by the pushes of all (`bsp`), beside "
    "torch's tutorial on batch RPC, whose server is one more process. Dense: a million parameters "
    "under SGD; sparse: 4096 ids of 100000 rows of 64 per worker under rowwise Adagrad:",
    {
        "": "{kind}, W = {workers}",
        "trireme": "{updates_per_s[ours]:.0f}",
        "torch RPC": "{updates_per_s[rpc]:.0f}",
        "times as many (quartiles)": _times_faster,
        "target": lambda row: f"{1 / row['ratio']['target']:.3g}x: {row['ratio']['verdict']}",
    },
    _updates,
)


def _model(results: Json) -> Rows:
    found = results.get("model")
    for contest in found["contests"] if found else ():
        steps = {
            side: pages.median_of(found["runs"][contest[side]], "step_ms")
            for side in ("ours", "theirs")
        }
        yield {**contest, "step_ms": steps}


MODEL = pages.Table(
    "A step of `{model[workload]}` under `bsp`, in ms, beside our own ZeRO 2, which moves "
    "gradients while backward runs:",
    {
        "parameter server": "{step_ms[ours]:.1f}",
        "ZeRO 2": "{step_ms[theirs]:.1f}",
        "ratio (quartiles)": RATIO,
        "target": TARGET,
    },
    _model,
)

_PATTERNS = {
    "always": "one worker is always slow",
    "sometimes": "each step is slow with a probability of 1/4",
}


def _modes(results: Json) -> Rows:
    for row in results.get("stragglers", {}).get("modes", ()):
        reached = sorted(seconds for seconds in row["seconds_to_good"] if seconds is not None)
        yield {
            **row,
            "pattern": _PATTERNS[row["pattern"]],
            "rate": statistics.median(row["updates_per_s"]),
            "factor": 1 / row["ratio_to_bsp"]["median"],
            "good": f"{statistics.median(reached):.1f}" if reached else "not reached",
        }


STRAGGLERS = pages.Table(
    "`examples/python/ps_stragglers.py`, 4 workers whose step sleeps {stragglers[step_ms]:g} ms, a "
    "slow one {stragglers[slow_ms]:g} ms; medians of {stragglers[seeds]} seeds:",
    {
        "": "{pattern}",
        "mode": "`{mode}`",
        "updates per s": "{rate:.0f}",
        "times bsp's": "{factor:.2f}",
        "target": pages.where("target", "{target:g}: {ratio_to_bsp[verdict]}"),
        "s until 95 % are right": "{good}",
    },
    _modes,
)


def _verbs(results: Json) -> Rows:
    found = results.get("cpp")
    for verb, times in found["times_us"].items() if found else ():
        verdict = found["verdicts"].get(verb)
        target = f"{found['target_us']:g}: {verdict}" if verdict else ""
        yield {"verb": verb, "us": statistics.median(times), "target": target}


CPP = pages.Table(
    "In C++, 4 bytes, us per call, under `async` if the parameters are not bound:",
    {"": "{verb}", "us": "{us:.2f}", "target": "{target}"},
    _verbs,
)


def ps_tables(results: Json) -> Blocks:
    """Yields every part that was run."""
    for part in (MESSAGES, CPP, ROWS, UPDATES, MODEL, STRAGGLERS):
        yield from part(results)
    yield pages.measured_on(results)
