"""Declares the tables of bench_gpu.py, whose machine is another one than that of the others."""

from __future__ import annotations

from readme_tables import Json, Table, every


def _step(row: Json) -> Json:
    times = row["in_job"]["step_ms"]
    return {**row, "alone": times["1 process"], "ms": times[row["side"]], "torch": row["beside"]}


STEPS = Table(
    "steps/{job}/ratios/{side}",
    "`bench_gpu.py`, one rank on one {gpu} over NCCL, medians of a step in ms; nothing is sent, so "
    "this is what the classes add:",
    "workload = `{job}` | no strategy = {alone:.2f} | trireme = {ms:.2f} ({side}) | "
    "torch = {torch_ms:.2f} ({torch}) | ratio (quartiles) = {in_side:ratio}",
    each=lambda row: {**_step(row), "torch_ms": row["in_job"]["step_ms"][row["beside"]]},
)
OPTIMIZERS = Table(
    "optimizers/{name}",
    "Steps of `trireme.optim` there, beside torch's fused ones and beside an in-place pass over as "
    "many bytes:",
    "= {name} | step, ms = {step_ms:.3f} | torch's fused, ms = {torch_step_ms:.3f} | "
    "ratio (quartiles) = {time_ratio:ratio} | of an in-place pass = {in_place_ratio:1/.0%}",
)
BUCKETS = Table(
    "buckets/buckets/{size}/{case}",
    "Gradients of transformer blocks into a bucket (`flatten`) and back, in one launch, beside the "
    "faster of torch's ways (a foreach copy, or an operator per tensor), and beside one copy of "
    "as many bytes:",
    "bucket = {size} | = {case} | tensors = {tensors} | GB/s = {gb_per_s:.0f} | "
    "torch, GB/s = {torch_gb_per_s:.0f} | ratio (quartiles) = {time_ratio:ratio} | "
    "of a copy's speed = {copy_ratio:1/.0%}",
)
gpu_tables = every(STEPS, OPTIMIZERS, BUCKETS)
