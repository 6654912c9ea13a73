"""examples/*/train_pipetransformer: both languages reach the same losses, whatever the parts."""

import re

import pytest

from examples.programs import ROOT, cpp_program, losses, run

PYTHON = [str(ROOT / "examples" / "python" / "train_pipetransformer.py")]
STEPS = 2


def numbers(printed: str, name: str) -> list[int]:
    return [int(number) for number in re.findall(rf"{name} (\d+)", printed)]


def test_parts_change_no_loss() -> None:
    printed = run(PYTHON, 2, "4", steps=STEPS)
    told, ablation = printed.split("\nDDP ", 1)
    assert numbers(told, "frozen") == [0, 3, 5, 6]
    plans = re.findall(r"plan (\d x \d)", told)
    assert plans[0] == "2 x 1" and plans[-1] == "1 x 2" and plans == sorted(plans, reverse=True)
    assert numbers(told, "hits")[:2] == [0, 0]  # rows are found once they have been stored
    epochs, last = losses(told), losses(ablation)
    assert len(epochs) == 4 and epochs[-1] < epochs[0] and len(last) == 7
    plain, *ddp, fixed, freezing, planned, everything = last
    assert fixed == pytest.approx(plain, rel=1e-4)
    for other in (*ddp, freezing, planned, everything):
        assert other == pytest.approx(epochs[-1], rel=1e-4)


def test_both_languages_reach_the_same_losses() -> None:
    of_cpp = run(cpp_program("train_pipetransformer"), 2, "3", steps=STEPS)
    of_python = run(PYTHON, 2, "3", steps=STEPS)
    assert losses(of_cpp) == pytest.approx(losses(of_python), rel=1e-4)
    assert numbers(of_cpp, "frozen") == numbers(of_python, "frozen")
