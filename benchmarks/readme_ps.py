"""Declares the tables of bench_ps.py."""

from __future__ import annotations

import statistics

from readme_tables import Json, Rows, Table, every


def _messages(results: Json) -> Rows:
    for size, found in results.get("sizes", {}).items():
        us = found["times_us"]
        for verb in ("pull", "push"):
            row = {"size": size, "verb": verb, "ratio": found["ratios_to_rpc"][f"ours {verb}"]}
            row |= {side: us[f"{side} {verb}"] for side in ("ours", "rpc", "gloo")}
            yield row | ({"bound": us["ours pull, bound"], **us} if verb == "pull" else {})


MESSAGES = Table(
    _messages,
    "`bench_ps.py`: pull and push of a module's parameters, in us per call, two processes of one "
    "thread each, beside torch RPC (TensorPipe) and Gloo's send and recv. A push of these only "
    "moves bytes, while one of ours applies SGD before it returns:",
    "= {verb}, {size} | trireme, ssp = {ours:.1f} | trireme, bound (bsp) = {bound:.1f} | "
    "torch RPC = {rpc:.1f} | Gloo = {gloo:.1f} | one copy = {copy:.1f} | "
    "faster than RPC (quartiles) = {ratio:timesx}",
)
CPP = Table(
    "cpp/times_us/{verb}",
    "In C++, 4 bytes, us per call, under `async` if the parameters are not bound:",
    "= {verb} | us = {in_verb:.2f}",
)


def _rows(results: Json) -> Rows:
    sparse = results.get("sparse", {"times_us": {}})
    for side, us in sparse["times_us"].items():
        ratio = sparse["ratios_to_torch"].get(side)
        yield {"side": side, "us": us, "per_us": sparse["ids"] / statistics.median(us), "r": ratio}


ROWS = Table(
    _rows,
    "Rows of a sparse table on one core: {sparse[ids]} ids a call out of {sparse[rows]} rows of "
    "{sparse[dim]} fp32, beside torch's gather (`index_select`) and scatter (`index_add_`) in one "
    "tensor:",
    "= {side} | us per call = {us:.0f} | million rows per s = {per_us:.1f} | "
    "of torch's rows per s = {r:1/.0%}",
)
UPDATES = Table(
    "updates",
    "Steps per second that workers make together, each by the pushes of all (`bsp`), beside "
    "torch's tutorial on batch RPC, whose server is one more process. Dense: a million parameters "
    "under SGD; sparse: 4096 ids of 100000 rows of 64 per worker under rowwise Adagrad:",
    "= {kind}, W = {workers} | trireme = {updates_per_s[ours]:.0f} | "
    "torch RPC = {updates_per_s[rpc]:.0f} | times as many (quartiles) = {ratio_to_rpc:timesx}",
)


def _model(results: Json) -> Rows:
    for contest in results.get("model", {}).get("contests", ()):
        runs = results["model"]["runs"]
        yield {**contest, "us": runs[contest["ours"]], "them": runs[contest["theirs"]]}


MODEL = Table(
    _model,
    "A step of `{model[workload]}` under `bsp`, in ms, beside our own ZeRO 2, which moves "
    "gradients while backward runs:",
    "parameter server = {us[step_ms]:.1f} | ZeRO 2 = {them[step_ms]:.1f} | "
    "ratio (quartiles) = {ratio:ratio}",
)
PATTERNS = {
    "always": "one worker is always slow",
    "sometimes": "each step is slow with a probability of 1/4",
}


def _mode(row: Json) -> Json:
    reached = [seconds for seconds in row["seconds_to_good"] if seconds is not None]
    good = f"{statistics.median(reached):.1f}" if reached else "not reached"
    return {**row, "pattern": PATTERNS[row["pattern"]], "good": good}


STRAGGLERS = Table(
    "stragglers/modes",
    "`examples/python/ps_stragglers.py`, 4 workers whose step sleeps {stragglers[step_ms]:g} ms, a "
    "slow one {stragglers[slow_ms]:g} ms; medians of {stragglers[seeds]} seeds:",
    "= {pattern} | mode = `{mode}` | updates per s = {updates_per_s:.0f} | "
    "times bsp's = {ratio_to_bsp:1/.2f} | s until 95 % are right = {good}",
    each=_mode,
)
ps_tables = every(MESSAGES, CPP, ROWS, UPDATES, MODEL, STRAGGLERS)
