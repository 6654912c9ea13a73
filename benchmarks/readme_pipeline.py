"""Declares the tables of bench_pipeline.py."""

from __future__ import annotations

from readme_tables import Table, every

SIDES = (
    "schedule = `{schedule}` | trireme, ms = {ours_ms:.1f} | torch, ms = {torch_ms:.1f} | "
    "trireme / torch (quartiles) = {ratio:ratio} | "
    "1 process x 1 / 2 threads, ms = {one_thread_ms:.1f} / {two_threads_ms:.1f}"
)
STEPS = Table(
    "steps/rows",
    "`bench_pipeline.py`, steps on 2 ranks of one thread each, ours over shared memory, torch's "
    "over Gloo, with the same schedule, micro-batches and cuts; beside both one process with the "
    "same micro-batches:",
    "model = `{workload}` | " + SIDES,
)
SPLITS = Table(
    "steps/splits",
    "What the split of the backward costs: our `zb-v` beside our `1f1b`:",
    "model = `{workload}` | zb-v / 1f1b (quartiles) = {ratio:ratio}",
)
BUBBLES = Table(
    "steps/bubbles",
    "The share of a step in which a rank computed nothing, beside what the schedule says where "
    "each action takes as long as it was measured to take:",
    "model = `{workload}` | schedule = `{schedule}` | measured = {measured:.3f} | "
    "computed = {computed:.3f}",
)
SMALL = Table(
    "small",
    "Layers of `Linear(8, 8)` and 32 micro-batches on 2 ranks, where all is overhead:",
    SIDES,
)
ENGINE = Table(
    "engine/rows",
    "These layers on one rank, `gpipe`: what a forward or a backward of all eight takes, where "
    "less than the bare arithmetic is noise:",
    "= {label} | us = {us:.1f} | beyond bare, us = {added_us:.1f}",
    foot=["Beyond the bare arithmetic, trireme / torch: {engine[share]:.3f}."],
)
THREADS = Table(
    "threads/rows",
    "In one process, two threads with a row each, beside torchgpipe, which computes all partitions "
    "in one thread, alone or with two threads in its operators, beside 2 ranks, and beside one "
    "process without a pipeline, ms of a step:",
    "model = `{workload}` | step() = {ms[step]:.1f} | pipe(x), backward() = {ms[pass]:.1f} | "
    "torchgpipe, 1 / 2 threads = "
    "{ms[torchgpipe, 1 thread]:.1f} / {ms[torchgpipe, 2 threads]:.1f} | "
    "2 ranks = {ms[ranks]:.1f} | "
    "1 process x 1 / 2 threads = {ms[1 thread]:.1f} / {ms[2 threads]:.1f}",
)
THREAD_RATIOS = Table(
    "threads/rows",
    "Ratios of these times, with quartiles; best is torchgpipe with one or with two threads, "
    "whichever is faster:",
    "model = `{workload}` | step() / torchgpipe = {step:ratio} | "
    "pipe(x) / torchgpipe = {pass:ratio} | pipe(x) / best = {fastest:ratio} | "
    "step() / 2 ranks = {ranks:ratio}",
)
THREAD_ENGINE = Table(
    "threads/engine/rows",
    "Layers of `Linear(8, 8)` and 32 micro-batches in one process: what a forward or a backward of "
    "a stage takes beyond the bare arithmetic of one thread (below 0 where threads overlap it):",
    "= {label} | us = {added_us:.1f}",
    foot=["`pipe(x)` / torchgpipe: {threads[engine][share]:.3f}."],
)
MESSAGES = Table(
    "messages",
    "A message, one way:",
    "KiB = {kib} | trireme, us = {ours_us:.1f} | Gloo, us = {torch_us:.1f} | "
    "trireme / Gloo (quartiles) = {ratio:ratio} | one copy, us = {copy_us:.1f} | "
    "trireme / copy = {copies:.2f}",
)
pipeline_tables = every(
    *(STEPS, SPLITS, BUBBLES, SMALL, ENGINE, THREADS, THREAD_RATIOS, THREAD_ENGINE, MESSAGES)
)
