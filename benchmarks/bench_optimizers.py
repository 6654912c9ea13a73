"""trireme.optim against torch's fused optimizers and against memory itself.

    python benchmarks/bench_optimizers.py --json benchmarks/results/optimizers.json
    python benchmarks/bench_optimizers.py --quick --threads 1

CPU rows always, CUDA rows where there is a GPU. Parameters: one flat tensor of 16.8 M elements, the
list of the workload `mlp` (as many, in 32 tensors), 1000 tensors of 64 elements. Both sides step
the same memory, in turns; of bf16 parameters torch has bf16 states and so fewer bytes to move. `of
in-place` compares bytes read and written per second with those of one in-place multiplication of a
contiguous tensor that moves as many, measured beside it; of small tensors it says nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_kernels import FULL, QUICK, Clock
from measure.bad_input import BadInput
from measure.exit_codes import exit_code
from measure.machine import cores, machine
from measure.results import write_results
from measure.stats import PairedRatio
from measure.strategies import require_trireme
from measure.table import table
from torch import Tensor, nn
from workloads import WORKLOADS, WorkloadOptions

FLAT_NUMEL = 16 << 20
SMALL_TENSORS = 1000
SMALL_NUMEL = 64
TORCH_TARGET = 1.0
IN_PLACE_SHARE_TARGET = 0.85

Shapes = list[torch.Size]


@dataclass(frozen=True)
class Case:
    """An optimizer over a list of parameters."""

    optimizer: str
    options: dict[str, Any]
    parameters: str
    dtype: torch.dtype

    @property
    def label(self) -> str:
        return f"{self.optimizer}, {self.parameters}, {str(self.dtype).removeprefix('torch.')}"


ADAMW: dict[str, Any] = {"lr": 1e-3}
SGD: dict[str, Any] = {"lr": 1e-6, "momentum": 0.9}
CASES = (
    Case("AdamW", ADAMW, "flat", torch.float32),
    Case("AdamW", ADAMW, "mlp", torch.float32),
    Case("AdamW", ADAMW, "small", torch.float32),
    Case("AdamW", ADAMW, "flat", torch.bfloat16),
    Case("SGD", SGD, "flat", torch.float32),
    Case("SGD", SGD, "mlp", torch.float32),
    Case("SGD", SGD, "small", torch.float32),
)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for wrong options."""
    arguments = _parser().parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    require_trireme("bench_optimizers", "or put <build>/python on PYTHONPATH.")
    if min(arguments.threads) < 1:
        raise BadInput(
            "bench_optimizers",
            f"got --threads {min(arguments.threads)}, expected at least 1",
            "Raise --threads.",
        )
    torch.manual_seed(0)
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "devices": {}}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        title = f"cpu, {threads} threads"
        results["devices"][title] = bench_device(title, torch.device("cpu"), arguments)
    if torch.cuda.is_available():
        title = f"cuda, {torch.cuda.get_device_name()}"
        results["devices"][title] = bench_device(title, torch.device("cuda"), arguments)
    if arguments.json is not None:
        write_results(arguments.json, results)
    return 0


def bench_device(
    title: str, device: torch.device, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Measures and prints all rows of one device; returns its part of the JSON."""
    clock = Clock(device, QUICK if arguments.quick else FULL)
    rows = {}
    for case in CASES:
        shapes = _shapes(case.parameters, arguments.tiny)
        rows[case.label] = bench_case(case, shapes, clock, device)
    print(title)
    print(_table(rows), flush=True)
    print(_verdicts(rows) + "\n")
    return rows


def bench_case(case: Case, shapes: Shapes, clock: Clock, device: torch.device) -> dict[str, Any]:
    pair = Pair(case, shapes, device)
    moved = pair.bytes_per_step()
    memory = torch.ones(max(1, moved // 8), device=device)  # fp32, read and written
    times = clock.compare(
        [
            itertools.repeat(pair.ours.step),
            itertools.repeat(pair.torchs.step),
            itertools.repeat(lambda: memory.mul_(1.0)),
        ]
    )
    step, torch_step, in_place = times
    row: dict[str, Any] = {
        "parameters": len(shapes),
        "numel": sum(shape.numel() for shape in shapes),
        "bytes": moved,
        "step_ms": 1e3 * statistics.median(step),
        "torch_step_ms": 1e3 * statistics.median(torch_step),
        "gb_per_s": moved / statistics.median(step) / 1e9,
        "in_place_gb_per_s": moved / statistics.median(in_place) / 1e9,
        "time_ratio": PairedRatio.of(step, torch_step, TORCH_TARGET).to_json(),
    }
    if case.parameters != "small":
        ratio = PairedRatio.of(step, in_place, 1 / IN_PLACE_SHARE_TARGET)
        row["in_place_ratio"] = ratio.to_json()
    return row


class Pair:
    """Both optimizers over the same parameters, gradients and, where they agree on them, states.

    So that neither has the luckier pages.
    """

    def __init__(self, case: Case, shapes: Shapes, device: torch.device) -> None:
        import trireme.optim

        self.parameters: list[Tensor] = []
        for shape in shapes:
            parameter = nn.Parameter(torch.randn(shape, device=device).to(case.dtype))
            parameter.grad = torch.randn(shape, device=device).to(case.dtype)
            self.parameters.append(parameter)
        self.torchs = self._make(torch.optim, case, fused=True)
        self.ours = self._make(trireme.optim, case)
        if case.dtype == torch.float32:
            self.ours.state = self.torchs.state

    def bytes_per_step(self) -> int:
        """Counts those of our step: parameters and states are read and written, gradients read."""
        written = list(self.parameters)
        for state in self.ours.state.values():
            written += [value for name, value in state.items() if name != "step"]
        read = sum(parameter.nbytes for parameter in self.parameters)
        return 2 * sum(tensor.nbytes for tensor in written) + read

    def _make(self, module: Any, case: Case, **options: Any) -> torch.optim.Optimizer:
        kind = getattr(module, case.optimizer)
        optimizer: torch.optim.Optimizer = kind(self.parameters, **case.options, **options)
        optimizer.step()  # makes the states
        return optimizer


def _shapes(parameters: str, tiny: bool) -> Shapes:
    if parameters == "flat":
        return [torch.Size([FLAT_NUMEL >> 10 if tiny else FLAT_NUMEL])]
    if parameters == "small":
        return [torch.Size([SMALL_NUMEL])] * (SMALL_TENSORS // 10 if tiny else SMALL_TENSORS)
    model = WORKLOADS["mlp"](WorkloadOptions(tiny=tiny)).model()
    return [parameter.shape for parameter in model.parameters()]


def _table(rows: dict[str, dict[str, Any]]) -> str:
    header = ["", "tensors", "step ms", "torch ms", "GB/s", "time vs torch", "of in-place"]
    return table(
        header,
        [
            [
                label,
                str(row["parameters"]),
                f"{row['step_ms']:.2f}",
                f"{row['torch_step_ms']:.2f}",
                f"{row['gb_per_s']:.1f}",
                "{:.3f} ({:.3f} to {:.3f})".format(
                    row["time_ratio"]["median"], *row["time_ratio"]["quartiles"]
                ),
                f"{1 / row['in_place_ratio']['median']:.0%}" if "in_place_ratio" in row else "",
            ]
            for label, row in rows.items()
        ],
    )


def _verdicts(rows: dict[str, dict[str, Any]]) -> str:
    label, row = max(rows.items(), key=lambda item: float(item[1]["time_ratio"]["median"]))
    lines = [
        f"slowest beside torch: {label}, {row['time_ratio']['median']:.3f}, "
        f"target {TORCH_TARGET:g}: {row['time_ratio']['verdict']}"
    ]
    large = {label: row["in_place_ratio"] for label, row in rows.items() if "in_place_ratio" in row}
    label, ratio = max(large.items(), key=lambda item: float(item[1]["median"]))
    lines.append(
        f"least of in-place: {label}, {1 / ratio['median']:.0%}, "
        f"target {IN_PLACE_SHARE_TARGET:.0%}: {ratio['verdict']}"
    )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="few rounds: to look, not to judge")
    parser.add_argument("--tiny", action="store_true", help="small parameters: to try the script")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, cores()}), help="of the CPU rows"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
