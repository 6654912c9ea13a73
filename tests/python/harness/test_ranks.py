"""The harness itself: results come back, failures come out, nothing stays behind."""

import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from harness import leftovers, ranks
from harness.ranks import RankFailed, run_ranks


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


def test_the_first_failure_comes_out_and_the_others_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.ranks._GRACE", 6)  # a busy machine gets three seconds more
    with pytest.raises(RankFailed) as caught:
        run_ranks(one_fails_then_zero, 3, tmp_path)
    assert caught.value.rank == 1
    assert "rank 1 cannot count" in caught.value.text
    assert "one_fails_then_zero" in caught.value.text
    assert str(caught.value).startswith("rank 1 failed:")
    assert "rank 0 failed:" in str(caught.value)
    assert_all_gone(tmp_path, 3)


def sleep_with_a_child(rank: int, folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    if rank == 1:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / str(child.pid)).touch()
        threading.Event().wait()


def test_a_hang_is_ended_with_its_stack_and_its_children(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"rank 1 hangs in:(.|\n)*sleep_with_a_child") as caught:
        run_ranks(sleep_with_a_child, 2, tmp_path, timeout=5)
    assert "rank 0 hangs" not in str(caught.value)
    assert_all_gone(tmp_path, 3)


def die_on_one(rank: int) -> str:
    if rank == 1:
        os._exit(7)
    return "alive"


def test_a_death_is_a_failure_unless_it_is_expected() -> None:
    with pytest.raises(RankFailed, match="rank 1 failed: ended with exit code 7"):
        run_ranks(die_on_one, 2)
    assert run_ranks(die_on_one, 2, dying=[1]) == ["alive", None]


def end_badly(rank: int) -> None:
    if rank == 1:
        util.Finalize(None, os._exit, (3,), exitpriority=0)


def test_a_bad_end_after_a_result_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="rank 1 failed: ended with exit code 3 after its result"):
        run_ranks(end_badly, 2, fresh=True)
    run_ranks(end_badly, 2, dying=[1])


# --- ranks that are kept -------------------------------------------------------------------------


def own_pid(rank: int) -> int:
    return os.getpid()


@pytest.fixture
def kept_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all other tests have fresh ones."""
    monkeypatch.setattr(ranks, "_FRESH", False)


@pytest.mark.usefixtures("kept_ranks")
def test_the_next_case_runs_in_the_same_processes() -> None:
    two = run_ranks(own_pid, 2)
    assert set(two) < set(run_ranks(own_pid, 3))
    for options in ({"fresh": True}, {"env": {"A_VARIABLE": "1"}}, {"dying": [1]}):
        assert not set(run_ranks(own_pid, 2, **options)) & set(two)
    assert set(run_ranks(own_pid, 3)) > set(two)


def fail_on_one(rank: int) -> int:
    if rank == 1:
        raise ArithmeticError("rank 1 cannot count")
    return os.getpid()


@pytest.mark.usefixtures("kept_ranks")
def test_no_process_of_a_case_that_failed_is_used_again() -> None:
    before = run_ranks(own_pid, 2)
    with pytest.raises(RankFailed):
        run_ranks(fail_on_one, 2)
    assert not set(before) & set(run_ranks(own_pid, 2))


@pytest.mark.usefixtures("kept_ranks")
def test_a_kept_rank_that_dies_is_named_with_the_case_before() -> None:
    pids = run_ranks(own_pid, 2)
    os.kill(pids[0], signal.SIGKILL)
    assert ranks._idle[0].pipe.poll(20)  # its end
    with pytest.raises(
        AssertionError, match=r"exit code -9 before its next case, after .*::test_a"
    ):
        run_ranks(own_pid, 2)
    run_ranks(own_pid, 2)


def place_and_store(rank: int) -> tuple[str, str, bool]:
    """Whether what another case has said is in the store of this one, too."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    is_known = store.check(["a case was here"])
    dist.barrier()
    store.set("a case was here", "")
    dist.destroy_process_group()
    return os.environ["RANK"], os.environ["WORLD_SIZE"], is_known


def test_each_case_has_a_store_and_a_place_of_its_own() -> None:
    first = run_ranks(place_and_store, 2)
    second = run_ranks(place_and_store, 3)
    assert first == [("0", "2", False), ("1", "2", False)]
    assert second == [("0", "3", False), ("1", "3", False), ("2", "3", False)]


def leave_a_group() -> None:
    dist.init_process_group("gloo")


def leave_a_run() -> None:
    trireme.init(device="cpu")


def leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, name="a lasting thread", daemon=True).start()


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "60"])


def leave_a_variable() -> None:
    os.environ["A_LASTING_VARIABLE"] = "1"


def leave_a_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def leave_a_hook() -> None:
    nn.modules.module.register_module_forward_hook(lasting_hook)


def lasting_hook(*_: object) -> None:
    pass


def leave_a_signal_handler() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def leave_a_file() -> None:
    KEPT.append(os.open("/proc/self/exe", os.O_RDONLY))


def leave_a_tensor() -> None:
    KEPT.append(torch.ones(100, 1000))


def leave_a_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))


def leave_a_log_handler() -> None:
    logging.getLogger("trireme").addHandler(logging.NullHandler())


KEPT: list[object] = []


def call(rank: int, program: Callable[[], None]) -> None:
    leftovers.PATIENCE_S = 0.1  # this process ends with its failure
    program()


@pytest.mark.parametrize(
    ("leave", "text"),
    [
        (leave_a_group, "groups: 0"),
        (leave_a_run, "run: 'begun by trireme.init()'"),
        (leave_a_thread, "threads: <Thread(a lasting thread"),
        (leave_a_process, "processes: process "),
        (leave_a_variable, "environment: {'A_LASTING_VARIABLE': '1'}, was {}"),
        (leave_a_dtype, "default dtype: torch.float64, was torch.float32"),
        (leave_a_hook, "global hooks: _global_forward_hooks: <function lasting_hook"),
        (leave_a_signal_handler, "signal handlers: {'SIGUSR2': "),
        (leave_a_file, "files: file /"),
        (leave_a_tensor, "tensors: Tensor [100, 1000] torch.float32"),
        (leave_a_limit, "limits: {'RLIMIT_NOFILE': (512, 512)"),
        (leave_a_log_handler, "logging: "),
    ],
)
def test_what_a_case_leaves_behind_is_named(leave: Callable[[], None], text: str) -> None:
    with pytest.raises(RankFailed, match=re.escape(f"the case left behind: {text}")):
        run_ranks(call, 1, leave)
