"""The programs of examples/python that train by another library's loop."""

import sys

import pytest

from examples.programs import ROOT, TEXT, losses
from harness.forked_programs import run_command, run_script

PROGRAMS = ROOT / "examples" / "python"


def trained(printed: str) -> list[float]:
    """The losses of the two epochs, which have fallen."""
    found = losses(printed)
    assert len(found) == 2 and found[1] < 0.95 * found[0] < 5.0, printed
    return found


def test_accelerate_gpt() -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    program = PROGRAMS / "accelerate_gpt.py"
    alone = trained(run_script(program, 1, str(TEXT)))
    together = trained(run_script(program, 2, str(TEXT)))
    sharded = trained(run_script(program, 2, str(TEXT), "fsdp"))
    assert together == pytest.approx(alone, rel=0.02)  # the batches are of other samples
    assert sharded == pytest.approx(together, rel=1e-4)


def test_lightning_gpt() -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    program = str(PROGRAMS / "lightning_gpt.py")
    trained(run_command([sys.executable, program, str(TEXT), "trireme_fsdp"], 1))


def test_trainer_gpt2_tiny() -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed")
    trained(run_script(PROGRAMS / "trainer_gpt2_tiny.py", 2, str(TEXT)))
