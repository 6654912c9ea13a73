"""examples/*/train_pipeline: any number of ranks learns what one does, in Python and in C++."""

import pytest

from examples.programs import ROOT, cpp_program, losses, run

PYTHON = [str(ROOT / "examples" / "python" / "train_pipeline.py")]

NAMES = [str(ROOT / "examples" / "python" / "train_pipeline_torch.py")]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    reached = losses(run(PYTHON, 1))
    assert len(reached) == 4 and reached[-1] < 0.8 * reached[0]
    return reached


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_reach_the_losses_of_one(alone: list[float], ranks: int, schedule: str) -> None:
    assert losses(run(PYTHON, ranks, schedule)) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_cpp_program_reaches_the_same_losses(alone: list[float], ranks: int) -> None:
    assert losses(run(cpp_program("train_pipeline"), ranks)) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("frontend", ["manual", "traced"])
def test_torchs_names_reach_the_same_losses(alone: list[float], frontend: str) -> None:
    assert losses(run(NAMES, 2, frontend)) == pytest.approx(alone, rel=1e-5)
