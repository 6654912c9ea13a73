"""The harness itself: results come back, failures come out, nothing stays behind."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import trireme

from distributed import RankFailed, run_ranks


def doubled(rank: int, tensor: torch.Tensor) -> dict[str, object]:
    return {"rank": rank, "twice": tensor * 2, "variables": os.environ["RANK"]}


def test_results_come_back_by_rank() -> None:
    results = run_ranks(doubled, 3, torch.arange(4.0))
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert [result["variables"] for result in results] == ["0", "1", "2"]
    torch.testing.assert_close(results[2]["twice"], torch.tensor([0.0, 2.0, 4.0, 6.0]))


def one_fails_then_zero(rank: int, folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    trireme.init(device="cpu")
    if rank == 0:
        dist.barrier()  # fails, because rank 1 never comes
    if rank == 1:
        raise ArithmeticError("rank 1 cannot count")
    threading.Event().wait()


def exists(pid: int) -> bool:
    # A killed process stays a zombie until the fork server has reaped it, which may be while its
    # status is read.
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_all_gone(folder: Path, count: int) -> None:
    pids = [int(file.name) for file in folder.iterdir()]
    assert len(pids) == count
    deadline = time.monotonic() + 20
    while any(map(exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(exists, pids))


def test_the_first_failure_comes_out_and_the_others_are_killed(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(one_fails_then_zero, 3, tmp_path)
    assert caught.value.rank == 1
    assert "rank 1 cannot count" in caught.value.text
    assert "one_fails_then_zero" in caught.value.text
    assert str(caught.value).startswith("rank 1 failed:")
    assert "rank 0 failed:" in str(caught.value)
    assert_all_gone(tmp_path, 3)


def sleep_with_a_child(rank: int, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for pid in (os.getpid(), child.pid):
        (folder / str(pid)).touch()
    if rank == 1:
        threading.Event().wait()


def test_a_hang_is_ended_with_its_stack_and_its_children(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 hangs in:(.|\n)*sleep_with_a_child") as caught:
        run_ranks(sleep_with_a_child, 2, tmp_path, timeout=5)
    assert "rank 0 hangs" not in str(caught.value)
    assert_all_gone(tmp_path, 4)


def die_on_one(rank: int) -> str:
    if rank == 1:
        os._exit(7)
    return "alive"


def test_a_death_is_a_failure_unless_it_is_expected() -> None:
    with pytest.raises(RankFailed, match="rank 1 failed:\nended with exit code 7"):
        run_ranks(die_on_one, 2)
    assert run_ranks(die_on_one, 2, dying=[1]) == ["alive", None]
