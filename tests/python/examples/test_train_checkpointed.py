"""examples/*/train_checkpointed: with and without checkpoints, in Python and in C++."""

import re

import pytest

from examples.programs import ROOT, cpp_program, losses, run
from harness.forked_programs import SAME_PEAKS

PYTHON = [str(ROOT / "examples" / "python" / "train_checkpointed.py")]


def peak_mib(printed: str) -> float:
    found = re.search(r"peak (\d+) MiB", printed)
    assert found, printed
    return float(found[1])


def test_both_programs_reach_the_same_losses_in_less_memory() -> None:
    """Checkpoints change no digit; the languages differ by rounding at most."""
    reached = []
    for program in (PYTHON, cpp_program("train_checkpointed")):
        plain, checkpointed = (
            run(program, 2, *how, steps=12, env=SAME_PEAKS) for how in (("never",), ())
        )
        assert losses(checkpointed) == losses(plain)
        assert peak_mib(checkpointed) < 0.75 * peak_mib(plain)
        reached.append(losses(plain))
    of_python, of_cpp = reached
    assert len(of_python) == 3 and of_python[-1] < 0.95 * of_python[0]
    assert of_cpp == pytest.approx(of_python, rel=1e-4)
