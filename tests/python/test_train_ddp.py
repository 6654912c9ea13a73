"""examples/python/train_ddp.py and its C++ twin are one program: they print the same losses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trireme

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "examples" / "python" / "train_gpt.py"  # any text will do
PYTHON = [str(ROOT / "examples" / "python" / "train_ddp.py")]
# Beside the package in a build tree; an installed package has no examples.
CPP = Path(trireme.__file__).parents[2] / "examples" / "cpp" / "train_ddp"


def losses(program: list[str], ranks: int) -> list[float]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finished = subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", *program, str(TEXT), "60"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", finished.stdout)]


def test_the_python_program_learns_the_same_over_any_number_of_ranks() -> None:
    alone, together = losses(PYTHON, 1), losses(PYTHON, 2)
    assert together[-1] < 0.8 * together[0]
    assert together == pytest.approx(alone, rel=1e-4)


def test_the_cpp_program_reaches_the_same_losses() -> None:
    if not CPP.exists():
        pytest.skip("the C++ examples are not built beside this package")
    assert losses(["--no-python", str(CPP)], 2) == pytest.approx(losses(PYTHON, 2), rel=1e-4)
