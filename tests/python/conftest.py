"""What every test starts from: no launcher around it, a fixed seed, no group of another test."""

import os
import subprocess
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import trireme

from harness.forked_programs import ForkedPopen
from harness.processes import without_launcher

# torch's Store asks DNS for the name of each address that connects to it, 127.0.0.1 included, and
# stands still until it is answered. After a failure it asks no more.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(autouse=True)
def fresh_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    trireme.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def forked_measure() -> Iterator[None]:
    """Ranks of the benchmarks are forked with torch imported: see forked_programs.py."""
    import measure.ranks

    class Forked:
        Popen, PIPE, TimeoutExpired = ForkedPopen, subprocess.PIPE, subprocess.TimeoutExpired

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.ranks, "subprocess", Forked)
        yield


@pytest.fixture
def lone_rank() -> trireme.Context:
    """A run of one rank in this process, on the CPU."""
    return trireme.init(device="cpu", set_threads=False)
