"""examples/*/train_pipeline_threads: threads of one process learn what one thread does."""

import pytest

from examples.programs import ROOT, cpp_program, losses, run

PYTHON = [str(ROOT / "examples" / "python" / "train_pipeline_threads.py")]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    reached = losses(run(PYTHON, 1, "1"))
    assert len(reached) == 4 and reached[-1] < 0.8 * reached[0]
    return reached


@pytest.mark.parametrize("threads", ["2", "3"])
def test_threads_reach_the_losses_of_one(alone: list[float], threads: str) -> None:
    assert losses(run(PYTHON, 1, threads)) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_cpp_program_reaches_the_same_losses(alone: list[float], threads: str) -> None:
    program = cpp_program("train_pipeline_threads")
    assert losses(run(program, 1, threads)) == pytest.approx(alone, rel=1e-4)
