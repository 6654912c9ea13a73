"""Where a group of the backend ``trireme`` comes from; test_hosts.py has several hosts."""

import importlib.metadata
import os
import re
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from trireme import _C

from harness.on_ranks import on_shm_ranks
from harness.processes import without_launcher
from harness.ranks import run_ranks
from harness.tensors import assert_bits
from shm.ranks import TORCH, of_all, reduced, values

ROOT = Path(__file__).resolve().parents[3]


def check_sums(world: int) -> None:
    for numel in (3, 20_000):
        tensor = values(dist.get_rank(), numel, torch.float32)
        dist.all_reduce(tensor)
        assert_bits(tensor, reduced(ReduceOp.SUM, of_all(world, numel, torch.float32)))


def start(rank: int, backend: str) -> str:
    dist.init_process_group(backend)
    check_sums(dist.get_world_size())
    named = dist.get_backend()
    dist.destroy_process_group()
    return named


@pytest.mark.parametrize("backend", ["trireme", "cpu:trireme", "TRIREME"])
def test_names_of_the_backend(backend: str) -> None:
    named = run_ranks(start, 2, backend)
    assert all("trireme" in name for name in named)
    assert dist.is_backend_available("trireme")
    assert dist.Backend.backend_capability["trireme"] == ["cpu"]
    # Whoever names no backend gets what torch would have given.
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


def start_in_a_file(rank: int, path: str) -> None:
    dist.init_process_group("trireme", init_method=f"file://{path}", rank=rank, world_size=3)
    check_sums(3)
    dist.destroy_process_group()


def test_ranks_that_meet_in_a_file(tmp_path: Path) -> None:
    run_ranks(start_in_a_file, 3, f"{tmp_path}/meet")


def test_one_rank_in_this_process() -> None:
    dist.init_process_group("trireme", store=dist.HashStore(), rank=0, world_size=1)
    check_sums(1)
    outputs: list[Any] = [None]
    dist.all_gather_object(outputs, {"alone": True})
    assert outputs == [{"alone": True}]
    dist.barrier()


class EmptyStore(dist.Store):
    """No other rank ever comes to it. Notes how long the one that is there would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.patience: timedelta | None = None

    def set(self, key: str, value: Any) -> None:
        pass

    def add(self, key: str, value: int) -> int:
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.patience = timeout
        raise TimeoutError("nobody else comes")


def test_ranks_wait_for_each_other_as_long_as_the_timeout_says() -> None:
    """But for 10 s at least: a timeout for collectives may be short."""
    for timeout, patience in (
        (timedelta(hours=2), timedelta(hours=2)),
        (timedelta(seconds=1), timedelta(seconds=10)),
        (timedelta(days=400), timedelta(days=1)),
    ):
        store = EmptyStore()
        with pytest.raises(Exception, match="nobody else comes"):
            _C.make_shm_backend(dist.PrefixStore("group", store), 0, 2, timeout)
        assert store.patience == patience


def start_again(rank: int) -> None:
    for _ in range(3):
        dist.init_process_group("trireme")
        check_sums(2)
        dist.destroy_process_group()


def test_a_run_may_follow_a_run() -> None:
    run_ranks(start_again, 2)


@on_shm_ranks(2)
def test_beside_another_backend(rank: int) -> None:
    """Each for the tensors it is named for; Gloo for whoever asks for it."""
    both = dist.new_group(backend="cpu:trireme,cuda:gloo")
    gloo = dist.new_group(backend="gloo")
    for group in (both, gloo):
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=group)
        assert torch.all(tensor == 2)


DETAILS = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def test_under_torchs_own_checks() -> None:
    """Its wrapper compares calls over Gloo before the backend sees them."""
    assert run_ranks(start, 2, "trireme", env=DETAILS) == ["trireme"] * 2


PROGRAM = """
    import sys
    import torch, torch.distributed as dist
    {imports}
    dist.init_process_group("{backend}")
    tensor = torch.full((9000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    assert dist.get_backend_config() in ("trireme", "cpu:trireme"), dist.get_backend_config()
    assert torch.all(tensor == 3), tensor
    sys.stdout.write(f"rank {{dist.get_rank()}} is fine\\n")  # in one piece
    {end}
"""


def check_torchrun(folder: Path, imports: str, backend: str, end: str) -> None:
    program = folder / "train.py"
    program.write_text(textwrap.dedent(PROGRAM.format(imports=imports, backend=backend, end=end)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**without_launcher(os.environ), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*command, str(program)], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"rank 0 is fine", "rank 1 is fine"} <= set(done.stdout.splitlines())


def test_torchrun_and_an_end_without_destroy_process_group(tmp_path: Path) -> None:
    check_torchrun(tmp_path, "import trireme", "cpu:trireme", "")


@pytest.mark.skipif(TORCH < (2, 14), reason="torch looks for entry points of backends since 2.14")
def test_torchrun_without_an_import(tmp_path: Path) -> None:
    """torch finds the backend by an entry point, of an installed package or of a build folder."""
    project = (ROOT / "pyproject.toml").read_text()
    (entry,) = re.findall(r'"torch.distributed.backends"\]\n(\w+) = "([\w.:]+)"', project)
    found = importlib.metadata.entry_points(group="torch.distributed.backends")
    assert [entry] == [(point.name, point.value) for point in found if point.name == "trireme"]
    check_torchrun(tmp_path, "", "trireme", "dist.destroy_process_group()")
