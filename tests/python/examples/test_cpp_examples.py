"""The C++ examples that have no Python twin: they run as their first lines say, and learn."""

import re
from pathlib import Path

import pytest

from examples.programs import TEXT, cpp_program, losses
from harness.forked_programs import run_command


def train_gpt(ranks: int, *options: str) -> list[str]:
    """The lines of each epoch, in which losses have all their digits."""
    printed = run_command([*cpp_program("train_gpt"), str(TEXT), *options], ranks)
    return re.findall(r"epoch .*", printed)


def losses_of_tests(lines: list[str]) -> list[float]:
    return [float(line.rsplit(" ", 1)[1]) for line in lines]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_resumed_run_equals_an_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    """Bit for bit: model, optimizer, schedule and the order of the data go on."""
    options = ("--strategy", strategy, "--epochs", "3")
    whole = train_gpt(2, *options)
    # The schedule is that of three epochs, so the first run is interrupted after one of them.
    folder = tmp_path / "checkpoint"
    first = train_gpt(2, *options, "--checkpoint", str(folder), "--stop-after", "1")
    assert first == whole[:1]
    rest = train_gpt(2, *options, "--checkpoint", str(folder))
    assert first + rest == whole
    assert losses_of_tests(whole)[-1] < losses_of_tests(whole)[0] < 5.5


def test_strategies_reach_one_loss_and_load_each_others_checkpoint(tmp_path: Path) -> None:
    alone = losses_of_tests(train_gpt(1, "--strategy", "single", "--batch-size", "32"))
    folder = str(tmp_path / "checkpoint")
    before = train_gpt(2, "--strategy", "zero2", "--checkpoint", folder, "--stop-after", "1")
    after = train_gpt(2, "--strategy", "fsdp", "--checkpoint", folder)
    together = losses_of_tests(before + after)
    assert together == pytest.approx(alone, rel=0.02)  # the samples of a batch are others
    in_bf16 = losses_of_tests(train_gpt(2, "--bf16"))
    assert in_bf16 != together and in_bf16 == pytest.approx(together, rel=0.02)


def test_sync_batch_norm_does_not_depend_on_the_number_of_ranks() -> None:
    program = cpp_program("sync_batch_norm")
    alone, together = run_command(program, 1), run_command(program, 3)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-3)
    assert losses(alone)[-1] < losses(alone)[0]


def test_a_communication_hook_reaches_the_losses_without_it() -> None:
    program = cpp_program("comm_hook")
    plain, hooked = losses(run_command([*program, "plain"], 2)), losses(run_command(program, 2))
    assert hooked != plain  # bf16 has rounded
    assert hooked == pytest.approx(plain, rel=0.1)
    assert plain[-1] < 0.5 * plain[0]


def test_hybrid_sharding_reaches_the_losses_of_one_rank() -> None:
    program = cpp_program("hsdp")
    alone, together = run_command(program, 1), run_command(program, 4)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-3)
    held = [int(re.search(r"trains (\d+)", text)[1]) for text in (alone, together)]  # type: ignore[index]
    assert held[1] == pytest.approx(held[0] / 2, rel=0.02)  # shared by two, not by four
