"""examples/python/ps_*.py beside ps_train.py: rows beside DDP, batched updates, slow workers."""

import re

import pytest

from examples.programs import ROOT, cpp_program, losses, run
from harness.forked_programs import run_script

PROGRAMS = ROOT / "examples" / "python"
HYBRID = [str(PROGRAMS / "ps_hybrid_ddp.py")]


def rows(printed: str) -> list[str]:
    return re.findall(r"^(\d+) rows$", printed, re.M)


# --- embeddings in a table, the rest under DDP ---------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> str:
    printed = run(HYBRID, 1)
    reached = losses(printed)
    assert len(reached) == 4 and reached[-1] < 0.8 * reached[0]
    assert int(rows(printed)[0]) > 1000
    return printed


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_learn_what_one_process_learns(alone: str, ranks: int) -> None:
    printed = run(HYBRID, ranks)
    assert losses(printed) == pytest.approx(losses(alone), rel=1e-3)
    assert rows(printed) == rows(alone)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_cpp_program_reaches_the_same_losses(alone: str, ranks: int) -> None:
    printed = run(cpp_program("train_ps_embedding"), ranks)
    assert losses(printed) == pytest.approx(losses(alone), rel=1e-3)
    assert rows(printed) == rows(alone)


# --- batched updates -----------------------------------------------------------------------------


def test_every_trainer_has_the_model_of_all_updates() -> None:
    printed = {ranks: run_script(PROGRAMS / "ps_batch_updates.py", ranks, "40") for ranks in (1, 3)}
    reached = losses(printed[3])
    assert reached[-1] < 0.5 * reached[0]
    assert reached == pytest.approx(losses(printed[1]), rel=1e-2)
    found = re.findall(r"trainer (\d) of 3: 40 pushes, sum (\S+)", printed[3])
    assert [trainer for trainer, _ in found] == ["0", "1", "2"]
    assert len({total for _, total in found}) == 1


# --- slow workers --------------------------------------------------------------------------------


def test_slow_workers_hold_up_who_waits_for_them() -> None:
    options = ("--seconds", "1.6", "--step-ms", "10", "--slow-ms", "160", "--patterns", "always")
    printed = run_script(PROGRAMS / "ps_stragglers.py", 4, *options)
    modes = ("bsp", "bsp-backup-1", "ssp-1", "ssp-3", "ssp-10", "async")
    found = re.findall(
        r"^always +(\S.*?) +([\d.]+) updates/s  loss ([\d.]+) to ([\d.]+)  95 %", printed, re.M
    )
    assert tuple(mode for mode, *_ in found) == modes
    rates = {mode: float(rate) for mode, rate, *_ in found}
    for waits_for_nobody in ("bsp-backup-1", "async"):
        assert rates[waits_for_nobody] > 1.5 * rates["bsp"]
    # A bound makes all as slow as the slowest, but for the first steps.
    assert rates["ssp-1"] < 0.7 * rates["async"]
    assert all(float(last) < float(first) for _, _, first, last in found)


def test_each_worker_may_be_slow_at_times() -> None:
    options = ("--seconds", "0.5", "--step-ms", "2", "--slow-ms", "8", "--modes", "bsp,async")
    printed = run_script(PROGRAMS / "ps_stragglers.py", 2, *options, "--patterns", "sometimes")
    assert len(re.findall(r"^sometimes .* updates/s", printed, re.M)) == 2
