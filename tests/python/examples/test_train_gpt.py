"""examples/python/train_gpt.py: under torchrun, as users start it; resumed; alone."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.programs import ROOT
from harness.forked_programs import ON_CPU, run_script

TRAIN_GPT = ROOT / "examples" / "python" / "train_gpt.py"
SMALL = ["--width", "16", "--depth", "1", "--length", "32"]
LIMIT_S = 100


@dataclass(frozen=True)
class Run:
    """What a finished training left behind."""

    printed: str
    checkpoint: Path
    losses: list[float]  # the test loss of every epoch


def run_of(printed: str, checkpoint: Path) -> Run:
    extra = json.loads((checkpoint / "extra.json").read_text())
    return Run(printed, checkpoint, extra["history"])


def train_gpt(ranks: int, checkpoint: Path, *options: str) -> Run:
    options = (*SMALL, "--checkpoint", str(checkpoint), *options)
    printed = run_script(TRAIN_GPT, ranks, *options, timeout=LIMIT_S)
    return run_of(printed, checkpoint)


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, two epochs, nothing in between, started as users do."""
    checkpoint = tmp_path_factory.mktemp("gpt") / "gpt"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = [*SMALL, "--checkpoint", str(checkpoint), "--epochs", "2"]
    finished = subprocess.run(
        [sys.executable, *launcher, str(TRAIN_GPT), *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **ON_CPU},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return run_of(finished.stdout + finished.stderr, checkpoint)


def test_two_ranks_learn(two_epochs: Run) -> None:
    first, second = two_epochs.losses
    assert second < first < 5.0  # a guess among 256 bytes has 5.5
    lines = [line for line in two_epochs.printed.splitlines() if "epoch 2" in line]
    assert len(lines) == 1  # rank 0 alone speaks
    assert f"test loss {second:.4f}" in lines[0]


def test_a_resumed_run_equals_an_uninterrupted_one(two_epochs: Run, tmp_path: Path) -> None:
    checkpoint = tmp_path / "gpt"
    interrupted = train_gpt(2, checkpoint, "--epochs", "1")
    resumed = train_gpt(2, checkpoint, "--epochs", "2", "--resume")
    assert resumed.losses[:1] == interrupted.losses
    assert resumed.losses == pytest.approx(two_epochs.losses, rel=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["gpt"]


def test_ddp_equals_torch_ddp(two_epochs: Run, tmp_path: Path) -> None:
    of_torch = train_gpt(2, tmp_path / "gpt", "--epochs", "2", "--strategy", "torch-ddp")
    assert two_epochs.losses == pytest.approx(of_torch.losses, rel=1e-4)


def test_sharded_optimizers_equal_ddp_and_load_each_others_state(
    two_epochs: Run, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "gpt"
    train_gpt(2, checkpoint, "--epochs", "1", "--strategy", "zero2")
    resumed = train_gpt(2, checkpoint, "--epochs", "2", "--strategy", "zero1", "--resume")
    assert resumed.losses == pytest.approx(two_epochs.losses, rel=1e-4)


def test_alone_with_mixed_precision_and_tensorboard(tmp_path: Path) -> None:
    board = tmp_path / "board"
    options = ["--epochs", "1", "--strategy", "none", "--amp"]
    if importlib.util.find_spec("tensorboard") is not None:
        options += ["--tensorboard", str(board)]
    run = train_gpt(1, tmp_path / "gpt", *options)
    assert run.losses[0] < 5.0
    (file,) = run.checkpoint.glob("model-*.safetensors")
    assert {weight.dtype for weight in load_file(file).values()} == {torch.float32}
    if "--tensorboard" in options:
        assert any(path.stat().st_size > 0 for path in board.rglob("events.*"))
