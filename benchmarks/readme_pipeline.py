"""Writes the tables of bench_pipeline.py, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from measure import pages
from measure.pages import Blocks, Json
from readme_steps import RATIO, TARGET


def _of_steps(part: str) -> Callable[[Json], Iterable[Json]]:
    return lambda results: results.get("steps", {}).get(part, ())


COLUMNS = {
    "schedule": "`{schedule}`",
    "trireme, ms": "{ours_ms:.1f}",
    "torch, ms": "{torch_ms:.1f}",
    "1 process x 1 / 2 threads, ms": "{one_thread_ms:.1f} / {two_threads_ms:.1f}",
    "trireme / torch (quartiles)": RATIO,
    "target": TARGET,
}
STEPS = pages.Table(
    "`bench_pipeline.py`, steps on 2 ranks of one thread each, ours over shared memory, torch's "
    "over Gloo, with the same schedule, micro-batches and cuts; beside both one process with the "
    "same micro-batches:",
    {"model": "`{workload}`", **COLUMNS},
    _of_steps("rows"),
)
SPLITS = pages.Table(
    "What the split of the backward costs: our `zb-v` beside our `1f1b`:",
    {"model": "`{workload}`", "zb-v / 1f1b (quartiles)": RATIO, "target": TARGET},
    _of_steps("splits"),
)
BUBBLES = pages.Table(
    "The share of a step in which a rank computed nothing, beside what the schedule says where "
    "each action takes as long as it was measured to take:",
    {
        "model": "`{workload}`",
        "schedule": "`{schedule}`",
        "measured": "{measured:.3f}",
        "computed": "{computed:.3f}",
        "target: within 0.03": "{verdict}",
    },
    _of_steps("bubbles"),
)
SMALL = pages.Table(
    "Layers of `Linear(8, 8)` and 32 micro-batches on 2 ranks, where all is overhead:",
    COLUMNS,
    "small",
)
ENGINE = pages.Table(
    "These layers on one rank, `gpipe`: what a forward or a backward of all eight takes, where "
    "less than the bare arithmetic is noise:",
    {"": "{label}", "us": "{us:.1f}", "beyond bare, us": "{added_us:.1f}"},
    lambda results: results.get("engine", {}).get("rows", ()),
    foot=[
        lambda results: (
            "Beyond the bare arithmetic, trireme / torch: {share:.3f}, target {target:g}: "
            "{verdict}.".format_map(results["engine"])
        )
    ],
)


def _of_threads(part: str) -> Callable[[Json], Iterable[Json]]:
    return lambda results: results.get("threads", {}).get(part, ())


def _ratio(name: str) -> str:
    return f"{{{name}[median]:.3f}} ({{{name}[quartiles][0]:.3f}} to {{{name}[quartiles][1]:.3f}})"


def _target(name: str) -> str:
    return f"{{{name}[target]:g}}: {{{name}[verdict]}}"


THREADS = pages.Table(
    "In one process, two threads with a row each, beside torchgpipe, which computes all partitions "
    "in one thread, alone or with two threads in its operators (best: the faster of both), beside "
    "2 ranks, and beside one process without a pipeline:",
    {
        "model": "`{workload}`",
        "step(), ms": "{ms[step]:.1f}",
        "pipe(x), backward(), ms": "{ms[pass]:.1f}",
        "torchgpipe, 1 / 2 threads, ms": (
            "{ms[torchgpipe, 1 thread]:.1f} / {ms[torchgpipe, 2 threads]:.1f}"
        ),
        "2 ranks, ms": "{ms[ranks]:.1f}",
        "1 process x 1 / 2 threads, ms": "{ms[1 thread]:.1f} / {ms[2 threads]:.1f}",
        "step() / torchgpipe": _ratio("step"),
        "target": _target("step"),
        "pipe(x) / torchgpipe": _ratio("pass"),
        "target of that": _target("pass"),
        "pipe(x) / best": _ratio("fastest"),
        "target of best": _target("fastest"),
        "step() / 2 ranks": _ratio("ranks"),
        "target of ranks": _target("ranks"),
    },
    _of_threads("rows"),
)
THREAD_ENGINE = pages.Table(
    "Layers of `Linear(8, 8)` and 32 micro-batches in one process: what a forward or a backward of "
    "a stage takes beyond the bare arithmetic of one thread (below 0 where threads overlap it):",
    {"": "{label}", "us": "{added_us:.1f}"},
    lambda results: results.get("threads", {}).get("engine", {}).get("rows", ()),
    foot=[
        lambda results: (
            "`pipe(x)` / torchgpipe: {share:.3f}, target {target:g}: {verdict}.".format_map(
                results["threads"]["engine"]
            )
        )
    ],
)
MESSAGES = pages.Table(
    "A message, one way:",
    {
        "KiB": "{kib}",
        "trireme, us": "{ours_us:.1f}",
        "Gloo, us": "{torch_us:.1f}",
        "one copy, us": "{copy_us:.1f}",
        "trireme / Gloo (quartiles)": RATIO,
        "target": TARGET,
        "trireme / copy": pages.where("copies", "{copies[median]:.2f}"),
        "target of that": pages.where("copies", "{copies[target]:g}: {copies[verdict]}"),
    },
    "messages",
)


def pipeline_tables(results: Json) -> Blocks:
    """Yields every part that was run."""
    for part in (STEPS, SPLITS, BUBBLES, SMALL, ENGINE, THREADS, THREAD_ENGINE, MESSAGES):
        yield from part(results)
    yield pages.measured_on(results)
