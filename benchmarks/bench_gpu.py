"""What Trireme costs on one GPU, beside torch.

    python benchmarks/bench_gpu.py --json benchmarks/results/gpu.json

buckets (1 minute): gradients into a bucket and back, by our kernels (bench_kernels.py).

optimizers (1 minute): steps of trireme.optim (bench_optimizers.py).

steps (2 minutes): whole steps of DDP and fully_shard in a group of one rank over NCCL. Nothing is
sent, so this is what a class adds to a step: time of the host where kernels are short, and copies
on the GPU. All sides train in this process in turns, in rounds whose order alternates, on the same
batch and with torch's fused AdamW. Matrix products may use TF32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import bench_kernels
import bench_optimizers
import torch
import trireme
from bench_kernels import Effort
from measure.bad_input import BadInput
from measure.bench_options import run_in_parts
from measure.machine import cores
from measure.stats import PairedRatio
from measure.strategies import (
    Build,
    OptimizerSpec,
    Options,
    build_ddp,
    build_fsdp,
    build_plain,
    build_torch_ddp,
    build_torch_fsdp2,
)
from measure.table import table
from workloads import WORKLOADS, Batch, WorkloadOptions

JOBS = ("narrow", "mlp", "gpt", "gpt-large")
WARM_UP = 5
TARGET = 1.0


FULL = Effort(rounds=9, seconds_per_round=0.25)
QUICK = Effort(rounds=3, seconds_per_round=0.02)
VIEW = {"gradient_as_bucket_view": True}
KEPT = {"reshard_after_forward": False}
SIDES: dict[str, tuple[Build, Options]] = {
    "1 process": (build_plain, {}),
    "torch-ddp": (build_torch_ddp, {}),
    "torch-ddp + view": (build_torch_ddp, VIEW),
    "ddp": (build_ddp, {}),
    "torch-fsdp2": (build_torch_fsdp2, {}),
    "torch-fsdp2, kept": (build_torch_fsdp2, KEPT),
    "fsdp": (build_fsdp, {}),
    "fsdp, kept": (build_fsdp, KEPT),
}
# Each beside the fastest of torch's.
CONTESTS = {
    "ddp": ("torch-ddp", "torch-ddp + view"),
    "fsdp": ("torch-fsdp2", "torch-fsdp2, kept"),
    "fsdp, kept": ("torch-fsdp2", "torch-fsdp2, kept"),
}


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options or no GPU."""
    return run_in_parts("bench_gpu", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    if not torch.cuda.is_available():
        raise BadInput("bench_gpu", "got no CUDA device, expected one", "Run it where a GPU is.")
    results["gpu"] = torch.cuda.get_device_name()
    print(f"{part}, {results['gpu']}:", flush=True)
    results[part] = PARTS[part](quick)
    return True


def bench_buckets(quick: bool) -> dict[str, Any]:
    arguments = argparse.Namespace(threads=cores(), mib=bench_kernels.BUCKET_MIB)
    effort = bench_kernels.QUICK if quick else bench_kernels.FULL
    return bench_kernels.bench_device(torch.device("cuda"), arguments, effort)


def bench_optimizer_steps(quick: bool) -> dict[str, Any]:
    arguments = argparse.Namespace(quick=quick, tiny=False)
    title = f"cuda, {torch.cuda.get_device_name()}"
    return bench_optimizers.bench_device(title, torch.device("cuda"), arguments)


def bench_steps(quick: bool) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    with trireme.init(device="cuda") as context:
        effort = QUICK if quick else FULL
        return {job: measure_steps(job, context.device, effort, WorkloadOptions()) for job in JOBS}


def measure_steps(
    job: str, device: torch.device, effort: Effort, options: WorkloadOptions
) -> dict[str, Any]:
    """Measures and prints all sides of a workload; returns its part of the JSON."""
    steps = {name: Steps(job, name, device, options) for name in SIDES}
    counts = {name: side.calibrated(effort.seconds_per_round) for name, side in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(effort.rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(steps):
            times[name].append(1e3 * steps[name].seconds(counts[name]))
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = {}
    for ours, theirs in CONTESTS.items():
        best = min(theirs, key=medians.__getitem__)
        ratios[ours] = {"beside": best, **asdict(PairedRatio.of(times[ours], times[best], TARGET))}
    rows = [
        [name, f"{medians[name]:.3f}", f"{min(times[name]):.3f}", f"{max(times[name]):.3f}"]
        for name in SIDES
    ]
    print(table([f"{job}, ms of a step", "median", "least", "most"], rows))
    for name, ratio in ratios.items():
        low, high = ratio["quartiles"]
        print(f"{name} / {ratio['beside']}: {ratio['median']:.3f} ({low:.3f} to {high:.3f})")
    print(flush=True)
    return {"step_ms": times, "ratios": ratios}


class Steps:
    """One side: a model of its own, which trains on one batch."""

    def __init__(self, job: str, side: str, device: torch.device, options: WorkloadOptions) -> None:
        workload = WORKLOADS[job](options)
        rows = workload.samples().rows(torch.arange(workload.rows_per_rank))
        self._batch = Batch(rows.inputs.to(device), rows.targets.to(device))
        torch.manual_seed(0)
        build, arguments = SIDES[side]
        self._parallel = build(workload.model().to(device), OptimizerSpec(), arguments)
        self._loss, self._device = workload.loss, device
        self.seconds(WARM_UP)

    def calibrated(self, seconds: float) -> int:
        """How many steps take so long."""
        return max(1, round(seconds / self.seconds(WARM_UP)))

    def seconds(self, count: int) -> float:
        """Of one step, where so many run."""
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self._parallel.optimizer.zero_grad()
            output = self._parallel.module(self._batch.inputs)
            self._loss(output, self._batch).backward()
            self._parallel.optimizer.step()
        self._synchronize()
        return (time.perf_counter() - begin) / count

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "buckets": bench_buckets,
    "optimizers": bench_optimizer_steps,
    "steps": bench_steps,
}

if __name__ == "__main__":
    sys.exit(main())
