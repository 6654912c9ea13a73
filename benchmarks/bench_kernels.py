"""flatten and unflatten against torch's own ways to fill and empty a bucket.

    python benchmarks/bench_kernels.py --json benchmarks/results/kernels.json
    python benchmarks/bench_kernels.py --quick --threads 1

CPU rows always, CUDA rows where there is a GPU. A bucket holds the gradients of GPT blocks. Torch's
side is the faster of its two ways: one foreach copy and one multiplication of the bucket, or what
its DDP does, a multiplication per tensor into its part of the bucket. `of copy` compares bytes read
and written per second with those of one plain copy of a contiguous tensor, measured beside it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure.bad_input import BadInput
from measure.machine import cores, machine
from measure.results import write_results
from measure.stats import PairedRatio
from measure.strategies import require_trireme
from measure.table import table
from torch import Tensor

BUCKET_MIB = (25, 256)
WIDTH = 384
BLOCK_SHAPES = (
    *[(WIDTH,)] * 4,
    *[(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)],
    *[(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)],
)
SMALL_TENSORS = 1000
SMALL_NUMEL = 64
# Fresh memory for every call, as in training: a GPU's cache would otherwise hold a small bucket.
CUDA_FOOTPRINT_MIB = 1024
COPY_SHARE_TARGET = 0.85

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What is moved: gradients into a bucket ("flatten") or back ("unflatten")."""

    op: str
    tensor_dtype: torch.dtype
    flat_dtype: torch.dtype
    scale: float

    @property
    def label(self) -> str:
        dtypes = [str(d).removeprefix("torch.") for d in (self.tensor_dtype, self.flat_dtype)]
        source, target = dtypes if self.op == "flatten" else reversed(dtypes)
        return f"{self.op} {source} to {target}" + (f" x {self.scale:g}" if self.scale != 1 else "")


CASES = (
    Case("flatten", torch.float32, torch.float32, 1.0),
    Case("flatten", torch.float32, torch.float32, 0.3),
    Case("flatten", torch.float32, torch.bfloat16, 0.3),
    Case("flatten", torch.float32, torch.float16, 0.3),
    Case("flatten", torch.bfloat16, torch.bfloat16, 0.3),
    Case("unflatten", torch.float32, torch.float32, 1.0),
    Case("unflatten", torch.float32, torch.bfloat16, 1.0),
)


@dataclass(frozen=True)
class Effort:
    rounds: int
    seconds_per_round: float


FULL = Effort(rounds=9, seconds_per_round=0.2)
QUICK = Effort(rounds=3, seconds_per_round=0.05)


class Bucket:
    """Tensors, the flat tensor that holds them, and the parts of it that belong to each."""

    def __init__(self, numel: int, case: Case, device: torch.device) -> None:
        self.case = case
        self.tensors: list[Tensor] = []
        left = numel
        for shape in itertools.cycle(BLOCK_SHAPES):
            tensor = torch.randn(shape, device=device).to(case.tensor_dtype)
            if tensor.numel() > left:
                break
            self.tensors.append(tensor)
            left -= tensor.numel()
        total = sum(tensor.numel() for tensor in self.tensors)
        self.flat = torch.zeros(total, dtype=case.flat_dtype, device=device)
        parts = self.flat.split([tensor.numel() for tensor in self.tensors])
        self.parts = [p.view(t.shape) for p, t in zip(parts, self.tensors, strict=True)]

    @property
    def nbytes(self) -> int:
        """Read and written by one call."""
        return self.flat.nbytes + sum(tensor.nbytes for tensor in self.tensors)

    def ours(self) -> None:
        if self.case.op == "flatten":  # named, since choosing an overload prints the tensors
            torch.ops.trireme.flatten.into(self.tensors, self.flat, self.case.scale)
        else:
            torch.ops.trireme.unflatten(self.flat, self.tensors, self.case.scale)

    def torch_foreach(self) -> None:
        if self.case.op == "flatten":
            torch._foreach_copy_(self.parts, self.tensors)
            if self.case.scale != 1:
                self.flat.mul_(self.case.scale)
        else:
            torch._foreach_copy_(self.tensors, self.parts)

    def torch_each(self) -> None:
        if self.case.op == "flatten":
            for part, tensor in zip(self.parts, self.tensors, strict=True):
                if self.case.scale == 1:
                    part.copy_(tensor)
                else:
                    torch.mul(tensor, self.case.scale, out=part)
        else:
            for part, tensor in zip(self.parts, self.tensors, strict=True):
                tensor.copy_(part)


class Clock:
    """Seconds per call on one device, and calls in turn so that drift hits all alike."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self._device = device
        self._effort = effort

    def compare(self, calls: Sequence[Iterator[Call]]) -> list[list[float]]:
        """Per entry of `calls` one time per round; an entry yields the calls to make."""
        repeats = [
            max(1, round(self._effort.seconds_per_round / self._seconds(call, 3))) for call in calls
        ]
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(self._effort.rounds):
            order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
            for i in order:
                times[i].append(self._seconds(calls[i], repeats[i]))
        return times

    def _seconds(self, calls: Iterator[Call], repeats: int) -> float:
        next(calls)()
        if self._device.type == "cpu":
            begin = time.perf_counter()
            for _ in range(repeats):
                next(calls)()
            return (time.perf_counter() - begin) / repeats
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            next(calls)()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1000 / repeats


def main() -> int:
    arguments = _parser().parse_args()
    try:
        _check(arguments)
        require_trireme("bench_kernels", "or put <build>/python on PYTHONPATH.")
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    effort = QUICK if arguments.quick else FULL
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "devices": {}}
    for name in devices:
        results["devices"][name] = bench_device(torch.device(name), arguments, effort)
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


def bench_device(
    device: torch.device, arguments: argparse.Namespace, effort: Effort
) -> dict[str, Any]:
    """Measures and prints all rows of one device; returns its part of the JSON."""
    clock = Clock(device, effort)
    title = f"{arguments.threads} threads" if device.type == "cpu" else torch.cuda.get_device_name()
    found: dict[str, Any] = {"title": title, "buckets": {}}
    for mib in arguments.mib:
        rows = {case.label: bench_bucket(mib, case, clock, device) for case in CASES}
        found["buckets"][f"{mib} MiB"] = rows
        print(f"{device.type} ({title}), bucket of {mib} MiB in fp32")
        print(_bucket_table(rows), flush=True)
        if device.type == "cuda":
            print(_copy_verdict(rows))
        print()
    found["small"] = bench_small(clock, device)
    print(_small_table(device, found["small"]), flush=True)
    return found


def bench_bucket(mib: int, case: Case, clock: Clock, device: torch.device) -> dict[str, Any]:
    numel = mib * 2**20 // 4
    sets = max(1, CUDA_FOOTPRINT_MIB // (2 * mib)) if device.type == "cuda" else 1
    buckets = [Bucket(numel, case, device) for _ in range(sets)]
    plain = [(torch.empty_like(bucket.flat), bucket.flat) for bucket in buckets]
    ours, foreach, each, copy = clock.compare(
        [
            itertools.cycle([bucket.ours for bucket in buckets]),
            itertools.cycle([bucket.torch_foreach for bucket in buckets]),
            itertools.cycle([bucket.torch_each for bucket in buckets]),
            itertools.cycle([functools.partial(to.copy_, source) for to, source in plain]),
        ]
    )
    torch_best = min(foreach, each, key=statistics.median)
    copy_bytes = 2 * buckets[0].flat.nbytes
    copy_of_same_bytes = [seconds * buckets[0].nbytes / copy_bytes for seconds in copy]
    return {
        "tensors": len(buckets[0].tensors),
        "gb_per_s": buckets[0].nbytes / statistics.median(ours) / 1e9,
        "torch_gb_per_s": buckets[0].nbytes / statistics.median(torch_best) / 1e9,
        "copy_gb_per_s": copy_bytes / statistics.median(copy) / 1e9,
        "time_ratio": PairedRatio.of(ours, torch_best, 1.0).to_json(),
        "copy_ratio": PairedRatio.of(ours, copy_of_same_bytes, 1 / COPY_SHARE_TARGET).to_json(),
    }


def bench_small(clock: Clock, device: torch.device) -> dict[str, float]:
    """Nanoseconds per tensor of 64 elements, in a list of 1000 and alone."""
    tensors = [torch.randn(SMALL_NUMEL, device=device) for _ in range(SMALL_TENSORS)]
    flat = torch.zeros(SMALL_TENSORS * SMALL_NUMEL, device=device)
    parts = list(flat.split(SMALL_NUMEL))
    one, part = tensors[:1], parts[0]
    flatten = torch.ops.trireme.flatten.into
    times = clock.compare(
        [
            itertools.repeat(lambda: flatten(tensors, flat, 0.3)),
            itertools.repeat(lambda: torch._foreach_copy_(parts, tensors)),
            itertools.repeat(lambda: flatten(one, part, 0.3)),
            itertools.repeat(lambda: part.copy_(one[0])),
        ]
    )
    ours, theirs, ours_alone, theirs_alone = (1e9 * statistics.median(t) for t in times)
    return {
        "ns_per_tensor": ours / SMALL_TENSORS,
        "torch_foreach_copy_ns_per_tensor": theirs / SMALL_TENSORS,
        "ns_per_call": ours_alone,
        "torch_copy_ns_per_call": theirs_alone,
    }


def _bucket_table(rows: dict[str, dict[str, Any]]) -> str:
    header = ["", "tensors", "GB/s", "torch GB/s", "time vs torch", "of copy"]
    return table(
        header,
        [
            [
                label,
                str(row["tensors"]),
                f"{row['gb_per_s']:.1f}",
                f"{row['torch_gb_per_s']:.1f}",
                f"{row['time_ratio']['median']:.3f}",
                f"{1 / row['copy_ratio']['median']:.0%}",
            ]
            for label, row in rows.items()
        ],
    )


def _copy_verdict(rows: dict[str, dict[str, Any]]) -> str:
    label, row = min(rows.items(), key=lambda item: -item[1]["copy_ratio"]["median"])
    share = 1 / row["copy_ratio"]["median"]
    verdict = row["copy_ratio"]["verdict"]
    return f"lowest: {label}, {share:.0%} of a copy, target {COPY_SHARE_TARGET:.0%}: {verdict}"


def _small_table(device: torch.device, small: dict[str, float]) -> str:
    return table(
        [f"{device.type}, {SMALL_NUMEL} elements, ns per tensor", "trireme", "torch"],
        [
            [
                f"in a list of {SMALL_TENSORS} (torch: foreach copy, no scaling)",
                f"{small['ns_per_tensor']:.0f}",
                f"{small['torch_foreach_copy_ns_per_tensor']:.0f}",
            ],
            [
                "alone, from Python (torch: copy_, no scaling)",
                f"{small['ns_per_call']:.0f}",
                f"{small['torch_copy_ns_per_call']:.0f}",
            ],
        ],
    )


def _check(arguments: argparse.Namespace) -> None:
    for option, value in (("--threads", arguments.threads), ("--mib", min(arguments.mib))):
        if value < 1:
            raise BadInput(
                "bench_kernels", f"got {option} {value}, expected at least 1", f"Raise {option}."
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="few rounds: to look, not to judge")
    parser.add_argument("--threads", type=int, default=cores(), help="of the CPU rows")
    parser.add_argument("--mib", type=int, nargs="+", default=BUCKET_MIB, help="bucket sizes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
