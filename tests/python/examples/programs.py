"""Programs of examples/, run as ranks of small trainings, and the losses that they print."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import trireme

from harness.forked_programs import run_command, run_script

ROOT = Path(__file__).resolve().parents[3]
# A text that nobody edits: late losses depend on it by more than rounding.
TEXT = Path(__file__).with_name("text_to_learn.txt")
# Beside the package in a build tree; an installed package has no examples.
CPP = Path(trireme.__file__).parents[2] / "examples" / "cpp"


def cpp_program(name: str) -> list[str]:
    if not (CPP / name).exists():
        pytest.skip("the C++ examples are not built beside this package")
    return [str(CPP / name)]


def run(
    program: list[str],
    ranks: int,
    *options: str,
    steps: int = 60,
    env: Mapping[str, str] | None = None,
) -> str:
    """What so many steps print."""
    options = (str(TEXT), str(steps), *options)
    if program[0].endswith(".py"):
        return run_script(Path(program[0]), ranks, *options, env=env)
    return run_command([*program, *options], ranks, env=env)


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
