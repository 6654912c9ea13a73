"""Writes what bench_gpu.py measured."""

from __future__ import annotations

import statistics

from measure import pages
from measure.pages import Blocks, Json, Rows
from readme_steps import RATIO


def _steps(results: Json) -> Rows:
    for job, found in results.get("steps", {}).items():
        medians = {side: statistics.median(times) for side, times in found["step_ms"].items()}
        for side, ratio in found["ratios"].items():
            yield {
                **{"job": job, "side": side, "beside": ratio["beside"], "ratio": ratio},
                **{"alone": medians["1 process"], "ms": medians[side]},
                "torch_ms": medians[ratio["beside"]],
            }


STEPS = pages.Table(
    "`bench_gpu.py`, one rank on one {gpu} over NCCL, medians of a step in ms; nothing is sent, so "
    "this is what the classes add:",
    {
        "workload": "`{job}`",
        "no strategy": "{alone:.2f}",
        "trireme": "{ms:.2f} ({side})",
        "torch": "{torch_ms:.2f} ({beside})",
        "ratio (quartiles)": RATIO,
    },
    _steps,
)


def _optimizers(results: Json) -> Rows:
    for name, row in results.get("optimizers", {}).items():
        share = row.get("in_place_ratio")
        yield {
            **{"name": name, "ratio": row["time_ratio"], **row},
            "share": f"{1 / share['median']:.0%}" if share else "",
        }


OPTIMIZERS = pages.Table(
    "Steps of `trireme.optim` there, beside torch's fused ones and beside an in-place pass over as "
    "many bytes:",
    {
        "": "{name}",
        "step, ms": "{step_ms:.3f}",
        "torch's fused, ms": "{torch_step_ms:.3f}",
        "ratio (quartiles)": RATIO,
        "of an in-place pass": "{share}",
    },
    _optimizers,
)


def _buckets(results: Json) -> Rows:
    for size, cases in results.get("buckets", {}).get("buckets", {}).items():
        for case, row in cases.items():
            share = 1 / row["copy_ratio"]["median"]
            yield {**row, "size": size, "case": case, "ratio": row["time_ratio"], "share": share}


BUCKETS = pages.Table(
    "Gradients of transformer blocks into a bucket (`flatten`) and back, in one launch, beside the "
    "faster of torch's ways (a foreach copy, or an operator per tensor), and beside one copy of "
    "as many bytes:",
    {
        "bucket": "{size}",
        "": "{case}",
        "tensors": "{tensors}",
        "GB/s": "{gb_per_s:.0f}",
        "torch, GB/s": "{torch_gb_per_s:.0f}",
        "ratio (quartiles)": RATIO,
        "of a copy's speed": "{share:.0%}",
    },
    _buckets,
)


def gpu_tables(results: Json) -> Blocks:
    """Yields every part that was run."""
    for part in (STEPS, OPTIMIZERS, BUCKETS):
        yield from part(results)
    yield pages.measured_on(results)
