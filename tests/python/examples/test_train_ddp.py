"""examples/python/train_ddp.py and its C++ twins are one program: they print the same losses."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.programs import ROOT, cpp_program, losses, run

PYTHON = [str(ROOT / "examples" / "python" / "train_ddp.py")]


def test_the_python_program_learns_the_same_over_any_number_of_ranks() -> None:
    alone, together = losses(run(PYTHON, 1)), losses(run(PYTHON, 2))
    assert together[-1] < 0.8 * together[0]
    # Sums in another order, over 60 steps of Adam.
    assert together == pytest.approx(alone, rel=1e-3)


@pytest.fixture(scope="module")
def of_cpp_ddp() -> list[float]:
    return losses(run(cpp_program("train_ddp"), 2))


def test_the_cpp_program_reaches_the_same_losses(of_cpp_ddp: list[float]) -> None:
    assert of_cpp_ddp == pytest.approx(losses(run(PYTHON, 2)), rel=1e-4)


def test_zero_reaches_the_losses_of_ddp_and_saves_its_state(
    of_cpp_ddp: list[float], tmp_path: Path
) -> None:
    state = tmp_path / "optimizer.pt"
    of_zero = losses(run(cpp_program("train_zero"), 2, str(state)))
    assert of_zero == pytest.approx(of_cpp_ddp, rel=1e-4)
    # Two states of fp32 for each parameter, which rank 0 could not have written before.
    assert state.stat().st_size > 2 * 4 * (128 * 32 + 1024 * 256 + 256 * 128)


def test_replicas_in_one_process_reach_the_losses_of_ddp() -> None:
    program = [str(ROOT / "examples" / "python" / "train_dp.py")]
    alone = losses(run(PYTHON, 1))
    for replicas in ("1", "2"):
        assert losses(run(program, 1, replicas)) == pytest.approx(alone, rel=1e-3)


def test_one_process_with_replicas_reaches_the_losses_of_ddp(of_cpp_ddp: list[float]) -> None:
    for replicas in ("1", "3"):
        of_replicas = losses(run(cpp_program("train_dp"), 1, replicas))
        assert of_replicas == pytest.approx(of_cpp_ddp, rel=1e-3)


def test_fully_sharded_in_cpp_and_python_leaves_one_checkpoint(
    of_cpp_ddp: list[float], tmp_path: Path
) -> None:
    """Both reach the losses of DDP, and their ranks write the same files, which anybody reads."""
    python = [str(ROOT / "examples" / "python" / "train_fsdp.py")]
    written = []
    for name, program in (("cpp", cpp_program("train_fsdp")), ("python", python)):
        folder = tmp_path / name
        assert losses(run(program, 2, str(folder))) == pytest.approx(of_cpp_ddp, rel=1e-4)
        written.append(load_file(folder / "model-00001-of-00001.safetensors"))
    of_cpp, of_python = written
    assert of_cpp.keys() == of_python.keys() and len(of_cpp) == 5
    for name, values in of_cpp.items():
        torch.testing.assert_close(values, of_python[name], rtol=1e-2, atol=1e-2)
    # Two states of each parameter beside it.
    state = (tmp_path / "python" / "optimizer-00001-of-00001.safetensors").stat().st_size
    assert state > 2 * 4 * (128 * 32 + 1024 * 256 + 256 * 128)


@pytest.mark.parametrize(("first", "second"), [("cpp", "python"), ("python", "cpp")])
def test_one_language_goes_on_where_the_other_stopped(
    of_cpp_ddp: list[float], tmp_path: Path, first: str, second: str
) -> None:
    """Model, optimizer and step come back at another number of ranks, as if nobody had stopped."""
    programs = {
        "cpp": cpp_program("train_fsdp"),
        "python": [str(ROOT / "examples" / "python" / "train_fsdp.py")],
    }
    folder = str(tmp_path / "checkpoint")
    before = losses(run(programs[first], 2, folder, steps=30))
    after = losses(run(programs[second], 4, folder))
    assert [*before[:2], *after] == pytest.approx(of_cpp_ddp, rel=1e-4)
