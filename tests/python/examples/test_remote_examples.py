"""examples/*/remote_*, ps_remote_module.py: nets that live elsewhere, objects that are called."""

import re
import sys

import pytest

from examples.programs import ROOT, cpp_program, losses
from harness.forked_programs import run_command, run_commands, run_script

PROGRAMS = ROOT / "examples" / "python"
GOOD = 100


def rewards(printed: str) -> list[float]:
    return [float(reward) for reward in re.findall(r"average reward ([\d.]+)", printed)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# --- a net behind a forward ----------------------------------------------------------------------


def test_trainers_of_one_net_all_learn() -> None:
    printed = run_script(PROGRAMS / "ps_remote_module.py", 3, "60")
    for trainer in ("trainer1", "trainer2"):
        reached = losses("\n".join(re.findall(rf"^{trainer}  step.*$", printed, re.M)))
        assert len(reached) == 4
        assert reached[-1] < 0.5 * reached[0]
        right = re.search(rf"^{trainer}  ([\d.]+)% right$", printed, re.M)
        assert right and float(right[1]) > 80


# --- a recurrent net in three parts --------------------------------------------------------------


@pytest.fixture(scope="module")
def of_rnn() -> list[float]:
    printed = run_script(PROGRAMS / "remote_rnn.py", 2, "60")
    assert re.findall(r"^step (\d+) loss \d\.\d{4}$", printed, re.M) == [
        *("0", "10", "20", "30", "40", "50", "59")
    ]
    reached = losses(printed)
    assert reached[-1] < 0.3 * reached[0]
    return reached


def test_the_cpp_rnn_reaches_the_same_losses(of_rnn: list[float]) -> None:
    reached = losses(run_command([*cpp_program("remote_rnn"), "60"], 2))
    assert reached[:3] == pytest.approx(of_rnn[:3], abs=2e-4)
    assert reached == pytest.approx(of_rnn, rel=1e-2)


# --- an agent and observers ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_agent_learns_to_balance_the_pole(seed: str) -> None:
    reached = rewards(run_script(PROGRAMS / "remote_rl.py", 3, "--seed", seed))
    assert mean(reached[:3]) < 50
    assert mean(reached[-5:]) > GOOD


def test_rewards_do_not_depend_on_the_number_of_observers() -> None:
    alone, together = (
        rewards(run_script(PROGRAMS / "remote_rl.py", ranks, "--rounds", "3")) for ranks in (2, 4)
    )
    assert len(alone) == 3 and together == alone


def test_an_observer_in_cpp_plays_for_the_agent_in_python() -> None:
    program = cpp_program("remote_observer")
    of_python = rewards(run_script(PROGRAMS / "remote_rl.py", 2))
    agent = [sys.executable, str(PROGRAMS / "remote_rl.py")]
    of_cpp = rewards(run_commands([agent, program]))
    assert of_cpp[:3] == of_python[:3]  # both have these equations and random numbers
    assert mean(of_cpp[-5:]) > GOOD
