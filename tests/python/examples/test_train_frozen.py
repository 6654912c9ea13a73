"""examples/*/train_frozen: both languages freeze the same layers and reach the same losses."""

import re

import pytest

from examples.programs import ROOT, cpp_program, losses, run

PYTHON = [str(ROOT / "examples" / "python" / "train_frozen.py")]


def numbers(printed: str, name: str) -> list[int]:
    return [int(number) for number in re.findall(rf"{name} (\d+)", printed)]


@pytest.mark.parametrize("rule", ["schedule", "gradient"])
def test_both_programs_freeze_alike(rule: str) -> None:
    of_python, of_cpp = (
        run(program, 2, rule, steps=32) for program in (PYTHON, cpp_program("train_frozen"))
    )
    frozen = numbers(of_python, "frozen")
    assert frozen == numbers(of_cpp, "frozen") == sorted(frozen)
    assert frozen[0] == 0 < frozen[-1]
    if rule == "schedule":
        assert frozen == [0, 2, 4, 5, 5, 6, 6, 6]
    sent = numbers(of_python, "bytes")
    assert sent == numbers(of_cpp, "bytes")
    assert sent[-1] < sent[0] / 2
    assert len(losses(of_python)) == 8
    assert losses(of_cpp) == pytest.approx(losses(of_python), rel=1e-4)


def test_ranks_freeze_as_one_does_and_learn() -> None:
    alone, together = (run(PYTHON, ranks, "schedule", steps=64) for ranks in (1, 2))
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(together)[-1] < 0.8 * losses(together)[0]
