"""A run that is stopped goes on with any number of ranks, in both languages with one loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.programs import ROOT, cpp_program, losses, run

PYTHON = [str(ROOT / "examples" / "python" / "train_resume.py")]


def test_a_stopped_run_reaches_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole = losses(run(PYTHON, 1, "--folder", str(tmp_path / "whole"), steps=40))
    assert len(whole) == 8 and whole[-1] < whole[0]
    pieces = []
    for ranks, steps in ((2, 15), (3, 30), (1, 40)):
        printed = run(PYTHON, ranks, "--folder", str(tmp_path / "run"), "--every", "5", steps=steps)
        pieces += losses(printed)
    assert pieces == pytest.approx(whole, rel=1e-3)


def test_the_twin_in_cpp_reaches_the_same_losses(tmp_path: Path) -> None:
    program = cpp_program("train_resume")
    whole = losses(run(PYTHON, 2, "--folder", str(tmp_path / "whole"), steps=30))
    pieces = losses(run(program, 2, str(tmp_path / "run"), "5", steps=15))
    pieces += losses(run(program, 1, str(tmp_path / "run"), "5", steps=30))
    assert pieces == pytest.approx(whole, rel=1e-3)
