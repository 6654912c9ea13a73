"""examples/*/ps_train: under bsp workers learn what one process does, in Python and in C++."""

import pytest

from examples.programs import ROOT, cpp_program, losses, run

PYTHON = [str(ROOT / "examples" / "python" / "ps_train.py")]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    reached = losses(run(PYTHON, 1))
    assert len(reached) == 4 and reached[-1] < 0.8 * reached[0]
    return reached


@pytest.mark.parametrize("ranks", [2, 3])
def test_bsp_reaches_the_losses_of_one_process(alone: list[float], ranks: int) -> None:
    assert losses(run(PYTHON, ranks)) == pytest.approx(alone, rel=0.02 if ranks == 3 else 1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_cpp_program_reaches_the_same_losses(alone: list[float], ranks: int) -> None:
    assert losses(run(cpp_program("train_ps"), ranks)) == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_loose_modes_learn_as_well(alone: list[float], mode: str) -> None:
    for program in (PYTHON, cpp_program("train_ps")):
        reached = losses(run(program, 2, mode))
        assert reached[0] == pytest.approx(alone[0], rel=0.1)
        assert reached[-1] < 0.85 * reached[0]
