"""Declares the tables of bench_activation.py."""

from __future__ import annotations

from readme_tables import Table, every

PLACES = {"memory": "the memory of the host", "folder": "a folder"}
PEAKS = Table(
    "peak",
    "`bench_activation.py`, a step of `gpt` with 24 blocks in one process: what its activations "
    "take at the fullest moment, beside what `plan --checkpoint` says beforehand (auto at half of "
    "never):",
    "checkpoints = {checkpoint} | MiB at most = {measured_mib:.0f} | "
    "as planned = {planned_mib:.0f} | ratio = {share:.2f}",
)
STEPS = Table(
    "steps/rows",
    "Forward and backward of `gpt` with each block in a checkpoint:",
    "= {label} | ms = {step_ms:.0f} | of the time without = {beside_plain:.3f}",
    foot=["trireme / torch: {steps[ratio]:ratio}."],
)
CPP = Table(
    "cpp",
    "In C++, every block in a checkpoint, beside a plain step that runs each block twice by hand:",
    "model = `{model}` | plain step, ms = {once_ms:.1f} | blocks twice, ms = {twice_ms:.1f} | "
    "checkpoints, ms = {checkpointed_ms:.1f} | checkpoints / twice (quartiles) = {ratio:ratio}",
)
CALLS = Table(
    "call/rows",
    "What a checkpoint of `Linear(8, 8)` adds to forward, backward and a second forward:",
    "= {label} | us = {added_us:.1f} | functions of Python = {calls}",
    foot=["trireme / torch: {call[ratio]:ratio}."],
)
OFFLOAD = Table(
    "offload",
    "`gpt` with what its blocks save offloaded (on the CPU the memory of the host is where it is "
    "already), beside the longer of a plain step and a copy of as many bytes there and back:",
    "to = {to} | MiB = {mib:.0f} | step, ms = {step_ms:.0f} | plain step, ms = {plain_ms:.0f} | "
    "copy, ms = {copy_ms:.0f} | ratio (quartiles) = {ratio:ratio}",
    each=lambda row: {**row, "to": PLACES[row["where"]]},
)
activation_tables = every(PEAKS, STEPS, CPP, CALLS, OFFLOAD)
