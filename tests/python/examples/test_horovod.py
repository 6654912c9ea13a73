"""examples/python/horovod_digits.py and examples/cpp/horovod_sgd.cpp print the same losses."""

from pathlib import Path

import pytest

from examples.programs import ROOT, cpp_program, losses
from harness.forked_programs import run_command, run_script

DIGITS = Path(ROOT / "examples" / "python" / "horovod_digits.py")


def test_the_python_program_learns_the_same_over_any_number_of_ranks() -> None:
    alone, together = losses(run_script(DIGITS, 1)), losses(run_script(DIGITS, 2))
    assert together[-1] < 0.3 * together[0]
    assert together == pytest.approx(alone, rel=1e-3)


def test_the_cpp_program_reaches_the_same_losses() -> None:
    of_cpp = losses(run_command(cpp_program("horovod_sgd"), 2))
    assert of_cpp == pytest.approx(losses(run_script(DIGITS, 2)), rel=1e-3)
