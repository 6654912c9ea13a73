"""init() and shutdown(): who meets whom, on which device, with how many threads; and bad input."""

import contextlib
import math
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import trireme
from trireme import _C

from harness.meeting import store, until
from harness.ranks import run_ranks


def error_of(call: Any) -> str:
    with pytest.raises((ValueError, TypeError, dist.DistBackendError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


# --- One rank ---------------------------------------------------------------------------------


def test_alone_a_process_is_rank_0_of_1() -> None:
    with trireme.init(device="cpu") as context:
        assert (context.rank, context.world) == (0, 1)
        assert (context.local_rank, context.local_world) == (0, 1)
        assert context.device == torch.device("cpu")
        assert dist.get_backend() == "trireme"
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1]
    assert not dist.is_initialized()


@pytest.mark.parametrize(("code", "told"), [(0, []), (None, []), (3, ["SystemExit: 3"])])
def test_an_exit_inside_of_a_run(
    monkeypatch: pytest.MonkeyPatch, code: int | None, told: list[str]
) -> None:
    """Peers hear of an error only where the program ends with one."""
    heard: list[str] = []
    monkeypatch.setattr(_C, "leave_all_groups", heard.append)
    with pytest.raises(SystemExit), trireme.init(device="cpu"):
        sys.exit(code)
    assert heard == told
    assert not dist.is_initialized()


def test_a_run_may_follow_a_run() -> None:
    for _ in range(2):
        trireme.init(device="cpu")
        trireme.shutdown()
    trireme.shutdown()
    assert not dist.is_initialized()


def test_a_second_init_describes_the_run_and_does_not_end_it(lone_rank: trireme.Context) -> None:
    with trireme.init() as again:
        assert again == lone_rank
    assert dist.is_initialized()
    assert error_of(lambda: trireme.init("mpi")) == (
        "ValueError: [launch] backend is 'mpi', but the default group exists and has 'trireme' "
        "(rank 0 of 1). Call shutdown() before another init()."
    )
    assert error_of(lambda: trireme.init(device="cuda")) == (
        "ValueError: [launch] device is cuda, but this rank was initialised on cpu (rank 0 of 1). "
        "Call shutdown() before another init()."
    )


def test_a_group_of_the_programs_own_is_adopted_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with trireme.init() as context:
        assert (context.rank, context.world, context.device.type) == (0, 1, "cpu")
    trireme.shutdown()
    assert dist.is_initialized()


def test_the_fake_backend_needs_nobody_to_meet() -> None:
    with trireme.init("fake", rank=1, world=4, device="cpu") as context:
        assert (context.rank, context.world) == (1, 4)


def test_init_shares_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    trireme.init(device="cpu", set_threads=False)
    trireme.shutdown()
    assert torch.get_num_threads() == 3
    monkeypatch.setenv(
        "OMP_NUM_THREADS", "5"
    )  # torch has read it at its start, or not: ours to leave
    trireme.init(device="cpu")
    trireme.shutdown()
    assert torch.get_num_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    trireme.init(device="cpu")
    assert torch.get_num_threads() == _C.usable_cpus()


# --- Several ranks ----------------------------------------------------------------------------


def meet(rank: int, *inits: dict[str, Any]) -> list[tuple[int, int, int, int, float]]:
    found = []
    for arguments in inits:
        with trireme.init(device="cpu", timeout=30, **arguments) as context:
            value = torch.tensor(float(rank + 1))
            dist.all_reduce(value)
            place = (context.rank, context.world, context.local_rank, context.local_world)
            found.append((*place, value.item()))
    return found


def test_ranks_meet_where_torchrun_says() -> None:
    expected = [[(rank, 3, rank, 3, 6.0)] for rank in range(3)]
    assert run_ranks(meet, 3, {}) == expected


def test_ranks_may_meet_again_in_the_same_place() -> None:
    assert run_ranks(meet, 2, {}, {}) == [[(rank, 2, rank, 2, 3.0)] * 2 for rank in range(2)]


def test_ranks_meet_in_a_file(tmp_path: Path) -> None:
    method = {"init_method": f"file://{tmp_path}/meet"}
    assert run_ranks(meet, 2, method) == [[(rank, 2, rank, 2, 3.0)] for rank in range(2)]
    variable = {"TRIREME_INIT_METHOD": f"file://{tmp_path}/meet2"}
    assert run_ranks(meet, 2, {}, env=variable) == [[(rank, 2, rank, 2, 3.0)] for rank in range(2)]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]


def free_port() -> int:
    """Below those that the system chooses, of which another test may get this one meanwhile."""
    for port in range(10_000 + os.getpid() % 20_000, 1 << 16):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise AssertionError("no port is free")


def last_rank_leaves_late(rank: int, folder: Path) -> str:
    context = trireme.init(device="cpu")
    if rank == 0:
        store().set("word of 0", "said")
        (folder / "rank 0 leaves").touch()
        with context:
            pass
        return (folder / "rank 1 has read").read_text()
    until((folder / "rank 0 leaves").exists)
    word = store().get("word of 0").decode()
    (folder / "rank 1 has read").write_text("before rank 0 had left")
    with context:
        pass
    return word


def test_rank_0_serves_the_store_until_the_last_has_left(tmp_path: Path) -> None:
    by_hand = {"TORCHELASTIC_USE_AGENT_STORE": "", "MASTER_PORT": str(free_port())}
    said = run_ranks(last_rank_leaves_late, 2, tmp_path, env=by_hand)
    assert said == ["before rank 0 had left", "said"]


def one_rank_raises(rank: int) -> str:
    try:
        with trireme.init(device="cpu"):
            if rank == 0:
                raise ArithmeticError
            dist.barrier()
    except ArithmeticError:
        return "raised"
    except RuntimeError:
        return "lost rank 0"
    return "saw nothing"


def test_a_rank_that_leaves_by_an_exception_fails_the_others_at_once() -> None:
    by_hand = {"TORCHELASTIC_USE_AGENT_STORE": "", "MASTER_PORT": str(free_port())}
    for env in ({}, by_hand):
        assert run_ranks(one_rank_raises, 2, env=env) == ["raised", "lost rank 0"]


def spawned(rank: int, folder: str) -> None:
    place = {"rank": rank, "world": 2, "init_method": f"file://{folder}/meet"}
    (Path(folder) / f"rank{rank}").write_text(str(meet(rank, place)))


def test_under_mp_spawn(tmp_path: Path) -> None:
    mp.spawn(spawned, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == str([(rank, 2, rank, 2, 3.0)])


SCRIPT = """
    import sys, torch, trireme
    with trireme.init(device="cpu", timeout=30) as context:
        mean = trireme.all_mean(context.rank)
        trireme.get_logger().info("hello")
        with open(f"{sys.argv[1]}/rank{context.rank}", "w") as file:
            file.write(f"{context} {mean} {torch.get_num_threads()}")
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    return [str(file), str(tmp_path)]


def expected_of_script(rank: int, threads: int) -> str:
    return (
        f"Context(rank={rank}, world=2, local_rank={rank}, local_world=2, "
        f"device=device(type='cpu')) 0.5 {threads}"
    )


def test_under_torchrun(tmp_path: Path, script: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*torchrun, *script], capture_output=True, text=True, timeout=90, check=False
    )
    assert run.returncode == 0, run.stderr
    threads = max(1, _C.usable_cpus() // 2)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == expected_of_script(rank, threads)
    assert run.stderr.count("[0/2] hello") == 1
    assert "[1/2] hello" not in run.stderr


def slurm_task(rank: int) -> dict[str, str]:
    return {
        **os.environ,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": str(os.getpid()),
    }


def test_under_srun(tmp_path: Path, script: list[str]) -> None:
    tasks = [
        subprocess.Popen([sys.executable, *script], env=slurm_task(rank), stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for task in tasks:
        _, errors = task.communicate(timeout=90)
        assert task.returncode == 0, errors.decode()
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == expected_of_script(rank, 1)


# --- Bad input --------------------------------------------------------------------------------


def test_a_rank_outside_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = (
        "ValueError: [launch] rank is 2, expected 0 to 1 (rank 2 of 2). Give every process a rank "
        "of its own below the world size, and all the same world size."
    )
    assert error_of(trireme.init) == expected
    assert error_of(lambda: trireme.init(rank=2, world=2)) == expected


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "RANK is set but WORLD_SIZE is not" in error_of(trireme.init)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert error_of(trireme.init) == (
        "ValueError: [launch] the ranks have no place to meet: MASTER_ADDR and MASTER_PORT are not "
        "set (rank 0 of 2). Start the program with torchrun, set the variables, or pass an "
        "init_method."
    )
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "MASTER_PORT is not set" in error_of(trireme.init)
    monkeypatch.setenv("MASTER_PORT", "65536")
    assert "MASTER_PORT is '65536', expected a whole number from 1 to 65535" in error_of(
        trireme.init
    )
    assert not dist.is_initialized()


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken_port() as port:
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        for name, value in {**variables, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        assert error_of(trireme.init) == (
            f"DistBackendError: [launch] localhost:{port} (MASTER_PORT) is in use by another "
            "program (rank 0 of 2). Choose a free port, or wait until the other run has ended."
        )


def test_a_rank_that_nobody_joins_gives_up() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    text = error_of(lambda: trireme.init(init_method=method, rank=0, world=2, timeout=1))
    assert text.startswith(
        f"DistBackendError: [launch] the ranks did not find each other at {method[6:]}: "
        "1 of 2 came within 1000 ms (rank 0 of 2)."
    )
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"backend": 3}, "TypeError: [launch] backend is int, expected str."),
        (
            {"init_method": Path("/tmp")},
            "TypeError: [launch] init_method is PosixPath, expected str.",
        ),
        ({"rank": "0", "world": 1}, "TypeError: [launch] rank is str, expected int."),
        ({"rank": True, "world": 1}, "TypeError: [launch] rank is bool, expected int."),
        ({"rank": 0}, "ValueError: [launch] rank and world were not given together."),
        ({"device": 0}, "TypeError: [launch] device is int, expected str or torch.device"),
        ({"device": "gpu"}, "ValueError: [launch] device is 'gpu', expected cpu or cuda."),
        ({"device": "meta"}, "ValueError: [launch] device is 'meta', expected cpu or cuda."),
        ({"timeout": "60"}, "TypeError: [launch] timeout is str, expected seconds or a timedelta."),
        ({"timeout": float("nan")}, "ValueError: [launch] timeout is nan, expected a number of"),
        ({"timeout": -math.inf}, "ValueError: [launch] timeout is -36525 days, 0:00:00, expected"),
        ({"timeout": 0}, "ValueError: [launch] timeout is 0:00:00, expected more than 0."),
        (
            {"timeout": timedelta(-1)},
            "ValueError: [launch] timeout is -1 day, 0:00:00, expected more",
        ),
        ({"backend": "smoke"}, "ValueError: [launch] backend is 'smoke', and this torch has no"),
        ({"backend": ""}, "ValueError: [launch] backend is '', and this torch has no"),
        (
            {"init_method": "host:1"},
            "ValueError: [launch] init_method is 'host:1', expected tcp://,",
        ),
        (
            {"backend": "nccl", "device": "cpu"},
            "ValueError: [launch] backend nccl cannot serve device",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], expected: str) -> None:
    text = error_of(lambda: trireme.init(**arguments))
    assert expected in text
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "arguments", [{"device": "cuda"}, {"device": "cuda:1"}, {"backend": "nccl"}]
)
def test_cuda_without_a_gpu_is_refused_not_replaced(arguments: dict[str, Any]) -> None:
    assert "but torch sees no GPU (rank 0 of 1)" in error_of(lambda: trireme.init(**arguments))


def test_importing_leaves_out_what_only_zero_needs() -> None:
    script = """
        import sys
        import trireme
        assert "torch.distributed.optim" not in sys.modules
        assert trireme.ZeroRedundancyOptimizer.__module__ == "trireme.zero"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
