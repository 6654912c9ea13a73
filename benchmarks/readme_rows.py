"""What templates show beyond the results themselves: rows by functions, and lines of text.

A function of rows makes any number of rows of one; `all` in it is the file. A function of texts
takes a file, or by name all files where a template says `all`; it returns "" if there is nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from measure.stats import NOISE
from readme_steps import STRATEGIES, fastest_ms, met_often, steps_of
from readme_tables import Json, Rows, found, text

RANKLESS = ("1 process", "no sync")  # the second computes, and learns nothing
PLACES = {"memory": "the memory of the host", "folder": "a folder"}
PATTERNS = {
    "always": "one worker is always slow",
    "sometimes": "each step is slow with a probability of 1/4",
}
BESIDE_TORCH = {
    "DDP / torch's DDP": ("ddp", "torch-ddp"),
    "ZeRO 2 / torch's DDP": ("zero2", "torch-ddp"),
    "`fully_shard` / torch's DDP": ("fsdp", "torch-ddp"),
    "`fully_shard` / torch's FSDP2": ("fsdp", "torch-fsdp2"),
}


def contests(results: Json) -> Rows:
    """Yields who met whom on which workload, with the median steps of all sides."""
    for _, row in found(results, "workloads/{workload}/contests"):
        yield from sides(row)


def sides(row: Json) -> Rows:
    steps = steps_of(row["all"]["workloads"][row["workload"]])
    yield {
        **row,
        "us_ms": steps.get(row["ours"]),
        "them_ms": steps.get(row["theirs"]),
        "steps": steps,
    }


def beside_torch(results: Json) -> Rows:
    """Yields ratios to torch's classes by workload, each with its fastest options."""
    for title, (ours, theirs) in BESIDE_TORCH.items():
        yield {"title": title} | {
            row["workload"]: row["ratio"]["median"]
            for row in contests(results)
            if row["ours"].startswith(ours) and row["theirs"].startswith(theirs)
            if "Gloo" not in row["ours"]
        }


def strategies(results: Json) -> Rows:
    """Yields all strategies, in parts of the time that torch's DDP takes."""
    for strategy in STRATEGIES:
        row: dict[str, Any] = {"strategy": strategy}
        for name, workload in results["workloads"].items():
            taken, torchs = fastest_ms(workload, strategy), fastest_ms(workload, "torch DDP")
            row[name] = taken / torchs if taken and torchs else None
        yield row


def counted(row: Json) -> Rows:
    yield {**row, "runs": len(row["in_label"])}


def per_parameter(row: Json) -> Rows:
    yield {**row, "per_parameter": row["between_steps"] * 2**20 / row["numel"]}


def widest(row: Json) -> Rows:
    width = row["width"]
    millions = 16 * (width + 1) * width / 1e6 if width else None
    yield {
        **row,
        "width": width or "none",
        "millions": millions,
        "peak": row["peaks"].get(str(width)),
    }


def added(row: Json) -> Rows:
    yield {**row, "added": [run["wrapped_ms"] - run["bare_ms"] for run in row["in_label"]]}


def sent(row: Json) -> Rows:
    """Yields what the two hosts sent in a step."""
    hosts = [[run["sent_mb"][host] for run in row["in_label"]] for host in (0, 1)]
    ratio = row["in_workload"]["bytes_ratios"].get(row["label"])
    yield {**row, "sent": [statistics.median(host) for host in hosts], "ratio": ratio}


def bytes_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def transfers(row: Json) -> Rows:
    yield {**row, "bytes": bytes_text(int(row["bytes"]))}


def short_transfers(row: Json) -> Rows:
    if int(row["bytes"]) in (64 << 10, 25 << 20):
        yield from transfers(row)


def loads(row: Json) -> Rows:
    """Yields a copy of the files, and every side that loaded them."""
    copies = [{"seconds": seconds} for seconds in row["copy_s"]]
    copy = {"label": "a copy of the files", "saved_by": "", "ranks": "", "runs": copies}
    for side in (copy, *row["sides"]):
        s = statistics.median(run["seconds"] for run in side["runs"])
        speed = row["all"]["model"]["checkpoint_mib"] * 2**20 / 1e9 / s
        yield {"share": None, **side, "s": s, "speed": speed}


def saved(row: Json) -> Rows:
    yield {**row, "lost_ms": 1e3 * row["lost_s"]}


def offloaded(row: Json) -> Rows:
    yield {**row, "to": PLACES[row["where"]]}


def gpu_steps(row: Json) -> Rows:
    times = row["in_job"]["step_ms"]
    sides = {
        "alone": times["1 process"],
        "ms": times[row["side"]],
        "torch_ms": times[row["beside"]],
    }
    yield {**row, **sides}


def messages(row: Json) -> Rows:
    """Yields pull or push on all sides; bound parameters and a copy stand beside a pull."""
    us, verb = row["in_size"]["times_us"], row["side"].removeprefix("ours ")
    beside = {"bound": us["ours pull, bound"], "copy": us["copy"]} if verb == "pull" else {}
    yield {**row, **beside, "verb": verb} | {s: us[f"{s} {verb}"] for s in ("ours", "rpc", "gloo")}


def sparse_rows(row: Json) -> Rows:
    sparse = row["all"]["sparse"]
    per_us = sparse["ids"] / statistics.median(row["in_side"])
    yield {**row, "per_us": per_us, "ratio": sparse["ratios_to_torch"].get(row["side"])}


def model_steps(row: Json) -> Rows:
    runs = row["all"]["model"]["runs"]
    yield {**row, "us": runs[row["ours"]], "them": runs[row["theirs"]]}


def slow_workers(row: Json) -> Rows:
    reached = [seconds for seconds in row["seconds_to_good"] if seconds is not None]
    good = f"{statistics.median(reached):.1f}" if reached else "not reached"
    yield {**row, "pattern": PATTERNS[row["pattern"]], "good": good}


def coded(row: Json) -> Rows:
    """Yields the cost of a code, and its speed as a share of an in-place pass'."""
    ns = 1e3 * statistics.median(row["us"]) / row["all"]["codes"]["numel"]
    share = text("{ratio:1/.0%}", row)
    if share:
        low, high = row["ratio"]["quartiles"]
        share = f"{share} ({1 / high:.0%} to {1 / low:.0%})"
    yield {**row, "ns": ns, "share": share}


def compressed_steps(row: Json) -> Rows:
    runs = row["all"]["steps"]["runs"]
    yield {**row, "us": runs[row["ours"]], "them": runs[row["theirs"]]}


LINKS = {
    "100mbit": "Two hosts, 100 Mbit/s",
    "1gbit": "Two hosts, 1 Gbit/s",
    "none": "Two hosts, a cable as fast as memory",
    "no_limit": "Two hosts, a cable as fast as memory",
    "host": "One host, two workers",
}


def in_rounds(row: Json) -> Rows:
    """Yields what a step takes in rounds, beside torch's DDP and beside no exchange."""
    runs = row["in_part"]["runs"]

    def ms(side: str) -> float:
        return statistics.median(run["step_ms"] for run in runs[side])

    own = ms(row["side"])
    sent = statistics.median(run["sent"] for run in row["in_side"]) / 1e6
    faster, share = ms("torch DDP") / own, ms("no exchange") / own
    yield {**row, "link": LINKS[row["part"]], "ms": own, "mb": sent} | {
        "faster": faster,
        "share": share,
    }


def over_cables(row: Json) -> Rows:
    """Yields what a step takes between hosts, beside torch's DDP."""
    part = row["in_part"]

    def ms(side: str) -> float:
        return statistics.median(run["step_ms"] for run in part["runs"][side])

    sent = max(row["in_side"][-1]["sent_mb"])
    faster = ms(part["plain"]) / ms(row["side"])
    yield {**row, "link": LINKS[row["part"]], "ms": ms(row["side"]), "mb": sent, "faster": faster}


def qualities(row: Json) -> Rows:
    """Yields the loss of a way to train, beside plain DDP's."""
    found = statistics.mean(row["in_way"])
    beside = found / statistics.mean(row["in_data"]["none"]) - 1
    yield {**row, "loss": found, "beside": beside}


def losses(row: Json) -> Rows:
    yield {**row, "says": row["text"] and f"`{row['text']}`".replace("|", "/")}


FROZEN_SIDES: Mapping[str, str] = {
    "ddp": "plain DDP",
    "ddp+freeze": "DDP + Freeze",
    "ddp+freeze+cache": "DDP + Freeze + cache",
    "pipeline": "fixed pipeline",
    "pipeline+freeze": "fixed pipeline + Freeze",
    "pipeline+freeze+plan": "+ plan and transform",
    "all": "all",
}


def frozen_epochs(row: Json) -> Rows:
    """Yields a side of PipeTransformer's ablation, with what it did in each epoch as text."""
    yield {**row, "side": FROZEN_SIDES[row["label"]], "last_hits": f"{row['hits'][-1]}"} | {
        "layers": " ".join(map(str, row["frozen"])),
        "lengths": " ".join(map(str, row.get("ranks", []))),
    }


def losses_by_alpha(row: Json) -> Rows:
    """Yields the losses of all epochs as text."""
    yield {**row, "losses": " ".join(f"{loss:.3f}" for loss in row["loss"])}


ROWS: Mapping[str, Callable[[Json], Rows]] = {
    function.__name__: function
    for function in (
        *(sides, beside_torch, strategies, counted, per_parameter, widest, added, sent, transfers),
        *(short_transfers, loads, saved, offloaded, gpu_steps, messages, sparse_rows, model_steps),
        *(slow_workers, losses, coded, compressed_steps, in_rounds, over_cables, qualities),
        *(frozen_epochs, losses_by_alpha),
    )
}


def measured_on(results: Json) -> str:
    """Says which machine, torch and commit the figures are from."""
    machine = results["machine"]
    commits = sorted({*results.get("commits", {}).values()} or {machine["commit"]})
    parts = [
        f"{machine['cores']} cores of {machine['cpu']}",
        f"torch {machine['torch']}",
        "commit " + ", ".join(commits).replace("+", " with changes"),
        *([machine["date"]] if "date" in machine else []),
        "heap warm on all sides" if "allocator" in machine else "heap as glibc leaves it",
    ]
    return "Measured on " + ", ".join(parts) + "."


def gib(results: Json) -> str:
    return f"{results['model']['checkpoint_mib'] / 1024:.1f}"


def peaks_of_ddp(results: Json) -> str:
    shown = "{ratio:.2f} (`{workload}`)"
    peaks = ", ".join(text(shown, r) for _, r in found(results, "workloads/{workload}/memory"))
    return peaks and f"Peak memory of a rank, ddp / torch-ddp + view: {peaks}."


def added_by_averaging(results: Json) -> str:
    taken = {name: steps_of(workload) for name, workload in results["workloads"].items()}
    more = "; ".join(
        f"{steps['ddp'] - steps['no sync']:.0f} ms (`{name}`)"
        for name, steps in taken.items()
        if "ddp" in steps and "no sync" in steps
    )
    return more and f"A step of DDP takes longer than one of ranks that never talk by {more}."


def added_per_gradient(results: Json) -> str:
    """Says what the reducer alone adds to a gradient, beside torch's fastest option set."""
    reducer = results.get("reducer", {})
    took = {  # ms for the 1,000 parameters of bench_overheads.py, so us for one
        label: statistics.median(run["wrapped_ms"] - run["bare_ms"] for run in runs)
        for label, runs in reducer.get("runs", {}).items()
    }
    each = "; ".join(
        f"{took[row['ours']]:.1f} us ({row['ours']}) beside {took[row['theirs']]:.1f} us "
        f"({row['theirs']}), ratio {row['ratio']['median']:.2f}"
        for row in reducer.get("contests", ())
    )
    return each and (
        "The reducer alone, with 1,000 tiny gradients and no communication, adds per gradient "
        f"{each}."
    )


def ratios_of(part: str) -> Callable[[Json], str]:
    shown = "{ours} / {theirs}: {ratio:ratio}"
    return lambda results: "; ".join(text(shown, r) for _, r in found(results, f"{part}/contests"))


def left_by_torch(results: Json) -> str:
    shown = "{left_by_torch:.0f} MiB in {ranks} ranks of {workload}"
    rows = found(results, "workloads/{workload}/memory")
    return ", ".join(filter(None, (text(shown, row) for _, row in rows)))


def added_by_distance(results: Json) -> str:
    """Says what being remote adds to a layer, here and in torch RPC."""
    if "module" not in results:
        return ""
    times = results["module"]["times_us"]
    ours, rpc, local = (statistics.median(times[side]) for side in ("ours", "rpc", "local"))
    return (
        f"The layer alone takes {local / rpc:.2f} of RPC's time. Being remote adds "
        f"{(ours - local) / 1000:.1f} ms to it here and {(rpc - local) / 1000:.1f} ms in RPC, a "
        f"ratio of {(ours - local) / (rpc - local):.2f}."
    )


def one_process(files: Json, *, wins: bool) -> str:
    """Says where one process with as many threads is faster, or slower, than ranks that train.

    What lies within the noise is neither.
    """
    cases = []
    for name, workload in files["steps"].get("workloads", {}).items():
        steps = dict(met_often(workload))
        ranks = {label: ms for label, ms in steps.items() if label not in (*RANKLESS, "dp")}
        best = min(ranks, key=lambda label: ranks[label], default=None)
        alone = steps.get("1 process")
        if best is None or alone is None:
            continue
        faster, slower = (alone, ranks[best]) if wins else (ranks[best], alone)
        if faster * (1 + NOISE) < slower:
            cases.append(f"`{name}` {alone:.0f} ms, the best ranks {ranks[best]:.0f} ({best})")
    return "; ".join(cases)


def uncompressed_steps(results: Json) -> str:
    """Says what steps take without compression."""
    steps = results.get("steps", {})
    return ", ".join(
        text("{runs[step_ms]:.0f} ms", {"runs": steps["runs"][label]}) + f" ({label})"
        for label in steps.get("plain", ())
    )


def killed(files: Json) -> str:
    """Says the longest that any rank went on without knowing of a death."""
    worst: dict[int, float] = {}
    for case in files["faults"].get("cases", ()):
        if case["kind"].startswith("killed"):
            worst[case["ranks"]] = max(worst.get(case["ranks"], 0.0), case["max_ms"])
    each = ", ".join(f"{most:.0f} ms at {ranks} ranks" for ranks, most in sorted(worst.items()))
    return each and f"{each} (the most in {files['faults']['tries']} tries of each kind)"


def slower(files: Json) -> str:
    return "; ".join(_slower(files))


def _slower(files: Json) -> Iterator[str]:
    for row in contests(files.get("steps", {})):
        if row["ratio"]["median"] > 1:
            yield text("{ours} on `{workload}` {ratio:.2f} of {theirs}", row)
    for _, row in found(files.get("optimizers", {}), "devices/{device}/{name}"):
        if row["time_ratio"]["median"] > 1 + NOISE:
            shown = "`trireme.optim`, {name} ({device}) {time_ratio:.2f} of torch's fused"
            yield text(shown, row)


def memory_beside_fsdp2(files: Json) -> str:
    """Says memory between steps and after a backward, beside torch's FSDP2."""
    rows = [row for _, row in found(files["memory"], "workloads/{workload}/memory")]
    held = {(row["side"], row["workload"], row["ranks"]): row for row in rows}
    return ", ".join(
        f"`{workload}` at {ranks} ranks {ours['between_steps']:.0f} against "
        f"{torchs['between_steps']:.0f} MiB (after a backward {ours['after_backward']:.0f} "
        f"against {torchs['after_backward']:.0f})"
        for (side, workload, ranks), ours in held.items()
        if side == "fsdp" and (torchs := held.get(("torch-fsdp2", workload, ranks)))
    )


TEXTS: Mapping[str, Callable[[Json], str]] = {
    function.__name__: function
    for function in (
        *(measured_on, gib, peaks_of_ddp, added_by_averaging, added_per_gradient, left_by_torch),
        *(added_by_distance, killed, slower, memory_beside_fsdp2, uncompressed_steps),
    )
} | {
    "one_process_wins": lambda files: one_process(files, wins=True),
    "one_process_loses": lambda files: one_process(files, wins=False),
    **{f"{part}_ratios": ratios_of(part) for part in ("reducer", "units", "gathered-units")},
}
