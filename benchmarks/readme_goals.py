"""Writes the one table of goals: each target of the results, met or missed, and why it is missed.

A target that no `Goal` finds, or that is missed for no reason that is declared, is an error.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from readme_costs import bytes_text
from readme_steps import steps_of
from readme_tables import Blocks, Json, Shown, found, markdown, text, verdicts

Missed = Sequence[Json]
Why = str | Callable[[Missed], str]


@dataclass(frozen=True)
class Goal:
    """Declares how targets of a file are said; `rows` leads to what has the verdict."""

    file: str
    rows: str
    what: Shown
    case: Shown
    result: Shown = "{median:.3f}"
    goal: Shown = "{target:g}"
    why: Why | Mapping[str, Why] = ""  # of all, or by `what`

    def reason(self, what: str, missed: Missed) -> str:
        why = self.why.get(what, "") if isinstance(self.why, Mapping) else self.why
        return why if isinstance(why, str) else why(missed)


def _each(shown: str, rows: Missed) -> str:
    return "; ".join(text(shown, row) for row in rows)


def _idle(missed: Missed) -> str:
    rows = []
    for row in missed:
        steps = steps_of(row["in_workload"])
        rows.append({**row, "idle": steps["no sync"] / steps[row["in_n"]["theirs"]]})
    return (
        "2 ranks that synchronize nothing take this part of the time of what is measured against: "
        + _each("{idle:.2f} (`{workload}`)", rows)
    )


def _arithmetic(missed: Missed) -> str:
    rows = []
    for row in missed:
        found_rows = row["all"]["steps"]["bubbles"]
        key = (row["in_n"]["workload"], row["in_n"]["schedule"])
        bubble = next(b["computed"] for b in found_rows if (b["workload"], b["schedule"]) == key)
        least = row["in_n"]["one_thread_ms"] / 2 / (1 - bubble)
        rows.append({**row, "least": least, "share": least / row["in_n"]["torch_ms"]})
    shown = "{least:.0f} ms, {share:.2f} of torch's (`{in_n[workload]}`, `{in_n[schedule]}`)"
    return (
        "The arithmetic alone, half the time of one thread divided by one less the computed "
        f"bubble, takes {_each(shown, rows)}"
    )


def _half_a_thread(missed: Missed) -> str:
    rows = [
        {**row, "half": row["in_n"]["one_thread_ms"] / 2 / row["in_n"]["torch_ms"]}
        for row in missed
    ]
    each = _each("{half:.2f} (`{in_n[schedule]}`)", rows)
    return f"Half the time of one thread is already this part of torch's: {each}"


def _side(label: str) -> str:
    """Returns the library and class of a side, without its options."""
    for start, name in (("torch-ddp", "torch's DDP"), ("torch-fsdp2", "torch's FSDP2")):
        if label.startswith(start):
            return name
    return f"`{label}`"


def _us(shown: str) -> Callable[[Json], str]:
    return lambda row: shown.format(statistics.median(row["all"]["cpp"]["times_us"][row["verb"]]))


SPEED = ("{median:1/.1f}x", "{target:1/.3g}x")
SHARE = ("{median:1/.0%}", "{target:1/.0%}")
MEMORY = (
    "Between steps a host holds the memory of gradients, too, rings of 8 MiB per rank, slots of "
    "at most 16 MiB, and what ranks hold that never talk; a few MiB per rank are not explained"
)
BANDWIDTH = (
    "With fp32 the share is not steady on this virtual machine: which rows miss differs from run "
    "to run. With bf16 a step moves 22 bytes per element, since states are fp32"
)
LOOKED_UP = (
    "torch is given the place of each row; a pull looks up each id in the index, and compares the "
    "version of each row before and after its copy; a push locks each row. Under rowwise Adagrad "
    "a push reads each gradient twice, and keeps a state and a step count of each row. On an Intel "
    "Xeon (commit 3471fed) a pull reached 60 % and a push with SGD 57 %"
)

GOALS = (
    Goal(
        "steps",
        "workloads/{workload}/contests/{n}/ratio",
        lambda row: f"step, {_side(row['in_n']['ours'])} / {_side(row['in_n']['theirs'])}",
        "`{workload}`",
        why={
            "step, `ddp` / torch's DDP": "Each rank copies its gradients to where the other reads "
            "them and adds up its half, on cores that backward keeps busy",
            "step, `zero1` / `ddp`": "The cause was not looked for",
            "step, `fsdp, foreach` / torch's FSDP2": _idle,
            "step, `dp` / `1 process`": lambda missed: (
                "In 128 small operators per forward the replicas wait for each other at the "
                "interpreter lock, and each wait ends with the wake-up of a thread. "
                + _idle(missed)
            ),
            "step, `ddp` / `1 process`": _idle,
            "step, `zero2` / `1 process`": _idle,
        },
    ),
    Goal(
        "steps",
        "workloads/{workload}/memory",
        "peak memory of a rank, `ddp` / torch's DDP",
        "`{workload}`",
        "{ratio:.2f}",
        why="Rings and slots of shared memory take more",
    ),
    Goal(
        "memory",
        "workloads/{workload}/memory/{n}",
        "MiB of a host between steps, `{side}`",
        "`{workload}`, {ranks} ranks",
        "{between_steps:.0f}",
        "{limit:.0f}",
        why=MEMORY,
    ),
    Goal(
        "overheads",
        "{part}/contests/{n}/ratio",
        "what a strategy adds to a small step ({part})",
        "{in_n[ours]} / {in_n[theirs]}",
    ),
    Goal(
        "overheads",
        "replicas/ratio",
        "what 2 replicas add to a call, / 150 us or three wake-ups where that is more",
        "`Linear(8, 8)`",
        why="Four wake-ups of a thread, and the Python code around them",
    ),
    Goal(
        "collectives",
        "operations/{operation}/{bytes}/ratio_to_gloo",
        "`{operation}`, times faster than Gloo",
        lambda row: bytes_text(int(row["bytes"])),
        *SPEED,
        why=dict.fromkeys(
            [f"`{name}`, times faster than Gloo" for name in ("all_reduce", "reduce_scatter")],
            "Large ones are bounded by the memory of the machine, small ones by the way from "
            "Python to the ranks and back; goals were set on a machine whose memory copies faster",
        ),
    ),
    Goal(
        "collectives",
        "operations/{operation}/{bytes}/ratio_to_copy",
        "`{operation}` / a copy by all ranks",
        lambda row: bytes_text(int(row["bytes"])),
        "{median:.2f}",
        why="The goal is meant for an all_reduce of 25 MiB and more, on a machine whose memory "
        "copies faster; small ones are bounded by the way from Python to the ranks and back",
    ),
    Goal("hosts", "workloads/{workload}/bytes_ratios/{side}", "bytes sent between hosts, `fsdp` / "
         "torch's FSDP2", "`{workload}`, {side}", "{median:.2f}"),
    Goal(
        "optimizers",
        "devices/{device}/{name}/time_ratio",
        "step of `trireme.optim` / torch's fused",
        "{name} ({device})",
        why="States of bf16 parameters are fp32: a step moves 22 bytes per element, torch's 14",
    ),
    Goal(
        "optimizers",
        "devices/{device}/{name}/in_place_ratio",
        "speed of `trireme.optim`, of an in-place pass",
        "{name} ({device})",
        *SHARE,
        why=BANDWIDTH,
    ),
    Goal(
        "checkpoint",
        "{cache}/sides/{n}/ratio",
        "load, of a copy's speed ({cache} page cache)",
        "{in_n[label]}, {in_n[saved_by]} to {in_n[ranks]} ranks",
        *SHARE,
        why="New memory for parameters and states: the virtual machine gets it from its host, and "
        "under DDP each of two ranks needs it",
    ),
    Goal(
        "checkpoint",
        "memory/{n}",
        "units that a host holds beyond the final state, in a load",
        "{label}, {saved_by} to {ranks} ranks",
        "{units:.2f}",
        "1",
    ),
    Goal("activation", "peak/{n}", "peak of activations / as planned", "{checkpoint}",
         "{share:.2f}", "within 10 %"),
    Goal("activation", "steps/ratio", "step with checkpoints / torch's", "`gpt`"),
    Goal("activation", "cpp/{n}/ratio", "C++: step with checkpoints / blocks twice by hand",
         "`{in_n[model]}`"),
    Goal(
        "activation",
        "call/ratio",
        "what a call of `checkpoint` adds / torch's",
        "`Linear(8, 8)`",
        why="The cause was not looked for. On an Intel Xeon (commit b6eb2c0) a call added half as "
        "much, and torch's three quarters as much as here, so the ratio was 0.20",
    ),
    Goal("activation", "offload/{n}/ratio", "step with offload / the longer of step and copy",
         "to {in_n[where]}"),
    Goal(
        "pipeline",
        "steps/rows/{n}/ratio",
        "step of a pipeline / torch's",
        "`{in_n[workload]}` `{in_n[schedule]}`",
        why=_arithmetic,
    ),
    Goal("pipeline", "steps/splits/{n}/ratio", "step, `zb-v` / `1f1b`", "`{in_n[workload]}`"),
    Goal(
        "pipeline",
        "steps/bubbles/{n}",
        "bubble, measured beside computed",
        "`{workload}` `{schedule}`",
        "{measured:.3f} beside {computed:.3f}",
        "within 0.03",
        why="The goal is meant for `gpt`; what is computed leaves out the time of messages",
    ),
    Goal(
        "pipeline",
        "small/{n}/ratio",
        "step of layers `Linear(8, 8)` / torch's",
        "`{in_n[schedule]}`",
        why=_half_a_thread,
    ),
    Goal("pipeline", "engine", "beyond bare arithmetic, 1 rank, / torch's", "`gpipe`",
         "{share:.3f}"),
    Goal(
        "pipeline",
        "threads/rows/{n}/{name}",
        lambda row: "in one process: " + {
            "step": "`step()` / torchgpipe",
            "pass": "`pipe(x)` / torchgpipe",
            "fastest": "`pipe(x)` / torchgpipe with 1 or 2 threads",
            "ranks": "`step()` / 2 ranks",
        }.get(row["name"], ""),
        "`{in_n[workload]}`",
    ),
    Goal("pipeline", "threads/engine", "in one process: beyond bare arithmetic, / torchgpipe's",
         "`pipe(x)`", "{share:.3f}"),
    Goal("pipeline", "messages/{n}/ratio", "message, / Gloo's", "{in_n[kib]} KiB"),
    Goal("pipeline", "messages/{n}/copies", "message, / one copy", "{in_n[kib]} KiB",
         "{median:.2f}"),
    Goal(
        "ps",
        "sizes/{size}/ratios_to_rpc/{verb}",
        "pull and push, times faster than torch RPC",
        lambda row: f"{row['verb'].removeprefix('ours ')}, {row['size']}",
        *SPEED,
    ),
    Goal("ps", "cpp/verdicts/{verb}", "C++, us of a call", "{verb}", _us("{:.2f}"),
         "{all[cpp][target_us]:g}"),
    Goal("ps", "sparse/ratios_to_torch/{verb}", "rows per s on one core, of torch's", "{verb}",
         *SHARE, why=LOOKED_UP),
    Goal(
        "ps",
        "updates/{n}/ratio_to_rpc",
        "{in_n[kind]} steps per s, times torch RPC's",
        "W = {in_n[workers]}",
        *SPEED,
        why={
            "sparse steps per s, times torch RPC's": "Ten times RPC's rate leaves one worker less "
            "time than the push of as many rows takes alone. Where the time of 2 and 4 workers "
            "goes was not profiled"
        },
    ),
    Goal("ps", "model/contests/{n}/ratio", "step under `bsp` / our ZeRO 2",
         "`{all[model][workload]}`"),
    Goal(
        "ps",
        "stragglers/modes/{n}/ratio_to_bsp",
        "updates per s with slow workers, times `bsp`'s",
        "`{in_n[mode]}`, {in_n[pattern]} slow",
        "{median:1/.2f}",
        "{target:1/.3g}",
        why="A late worker's gradient is dropped. The worker then begins the open clock after the "
        "others, so it is often late again",
    ),
    Goal("remote", "calls/{size}/ratio_to_rpc", "call / torch RPC's", "{size}"),
    Goal(
        "remote",
        "cpp/verdicts/{verb}",
        "C++, us of a call with a tensor",
        "4 bytes",
        _us("{:.1f}"),
        "{all[cpp][target_us]:g}",
        why="The tensor is described, copied into a slot that the receiver maps, and copied out of "
        "it, there and back; a call with an integer takes less",
    ),
    Goal(
        "remote",
        "module/ratio_to_rpc",
        "forward and backward of a remote layer / torch RPC's",
        "`Linear({all[module][width]}, {all[module][width]})`",
        why=lambda missed: "The layer alone takes {:.2f} of RPC's time".format(
            statistics.median(missed[0]["all"]["module"]["times_us"]["local"])
            / statistics.median(missed[0]["all"]["module"]["times_us"]["rpc"])
        ),
    ),
    Goal("remote", "batch/ratio_to_rpc", "calls per s in batches, times torch RPC's", "4 callers",
         *SPEED),
    Goal("remote", "memory/rows/{n}", "growth of resident memory", "{process}, after {after}",
         "{growth:+.2%}", "{all[memory][target]:.0%}"),
    Goal("remote", "faults/{n}", "s until a loss is known", "{kind}", "{most_s:.3f}",
         "{target_s:g}"),
    Goal("gpu", "steps/{job}/ratios/{side}", "step on one GPU / torch's", "`{job}` {side}"),
    Goal(
        "gpu",
        "optimizers/{name}/time_ratio",
        "step of `trireme.optim` on one GPU / torch's fused",
        "{name}",
        why="torch keeps its moments in bf16, `trireme.optim` in fp32",
    ),
    Goal("gpu", "optimizers/{name}/in_place_ratio", "speed of `trireme.optim` on one GPU, of an "
         "in-place pass", "{name}", *SHARE),
    Goal("gpu", "buckets/buckets/{size}/{case}/{ratio}", "buckets on one GPU, / {ratio}",
         "{case}, {size}", "{median:.2f}"),
    Goal("builds", "workloads/{workload}/{quantity}/ratios/{pair}", "builds of two commits, {pair}",
         "{workload}, {quantity}"),
)  # fmt: skip


def _groups(files: Mapping[str, Json]) -> Iterator[tuple[Goal, str, list[Json]]]:
    for goal in GOALS:
        results = files.get(goal.file, {})
        known = set(verdicts(results))
        groups: dict[str, list[Json]] = {}
        for where, row in found(results, goal.rows):
            if where in known:
                groups.setdefault(text(goal.what, row), []).append({**row, "where": where})
        yield from ((goal, what, rows) for what, rows in groups.items())


def _said(goal: Goal, rows: Sequence[Json]) -> str:
    each = []
    for row in rows:
        low, high = row.get("quartiles", (1, 0))
        noise = "within noise" if "noise" in _verdict(row) else ""
        spread = "between quartiles" if _missed(row) and low <= row.get("target", 0) <= high else ""
        beside = "; ".join(filter(None, [text(goal.goal, row), noise, spread]))
        each.append(f"{text(goal.case, row)}: {text(goal.result, row)} ({beside})")
    return "; ".join(each)


def _verdict(row: Json) -> str:
    return str(row.get("verdict", row.get("value")))


def _missed(row: Json) -> bool:
    return _verdict(row) == "missed"


def goals(files: Mapping[str, Json]) -> Blocks:
    """Yields the table, rows with misses first."""
    lines = []
    for goal, what, rows in _groups(files):
        missed = [row for row in rows if _missed(row)]
        lines.append(
            {
                "run": goal.file,
                "what": what,
                "missed": _said(goal, missed),
                "why": goal.reason(what, missed) if missed else "",
                "met": _said(goal, [row for row in rows if not _missed(row)]),
            }
        )
    if lines:
        rows = [*filter(_has_misses, lines), *(line for line in lines if not _has_misses(line))]
        yield markdown(
            "run = `{run}` | what = {what} | missed: result (goal) = {missed} | "
            "why it is missed = {why} | met: result (goal) = {met}",
            rows,
        )


def _has_misses(line: Json) -> bool:
    return bool(line["missed"])


def lacking(files: Mapping[str, Json]) -> Iterator[str]:
    """Yields which targets have no row, and which missed ones no reason."""
    shown: dict[str, list[object]] = {}
    for goal, what, rows in _groups(files):
        shown.setdefault(goal.file, []).extend(row["where"] for row in rows)
        missed = [row for row in rows if _missed(row)]
        if missed and not goal.reason(what, missed):
            yield f"got a missed goal without a reason: {goal.file}.json, {what}"
    for file, results in files.items():
        for where in verdicts(results):
            if (times := shown.get(file, []).count(where)) != 1:
                target = "/".join(where)
                yield f"got {times} rows for the target {target} of {file}.json, expected 1"
