"""benchmarks/bench_gpu.py: its steps run on the CPU, too, and it names what it needs."""

import sys
from pathlib import Path

import pytest
import torch
import trireme

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_gpu
from workloads import WorkloadOptions


def test_steps_of_every_side(lone_rank: trireme.Context) -> None:
    found = bench_gpu.measure_steps(
        "narrow", torch.device("cpu"), bench_gpu.QUICK, WorkloadOptions(tiny=True)
    )
    assert list(found["step_ms"]) == list(bench_gpu.SIDES)
    assert all(len(times) == bench_gpu.QUICK.rounds for times in found["step_ms"].values())
    for ours, ratio in found["ratios"].items():
        assert ratio["beside"] in bench_gpu.CONTESTS[ours] and ratio["median"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main(["--only", "steps"]) == 2
    text = "[bench_gpu] got no CUDA device, expected one. Run it where a GPU is."
    assert text in capsys.readouterr().err
