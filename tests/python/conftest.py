"""What every test starts from: no launcher around it, a fixed seed, no group of another test."""

import gc
import os
import subprocess
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import trireme
from tqdm import tqdm

from harness import leftovers
from harness.forked_programs import ForkedPopen
from harness.processes import without_launcher

# torch's Store asks DNS for the name of each address that connects to it, 127.0.0.1 included, and
# stands still until it is answered. After a failure it asks no more.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Looks for what a test leaves behind in this process, as each rank does for a case."""
    before = leftovers.look()
    yield
    leftovers.expect(before)


@pytest.fixture(autouse=True)
def fresh_rank(restored_process: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    trireme.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_collection_finish() -> None:
    tqdm.monitor_interval = 0  # torch.export draws progress, and tqdm keeps a thread for that
    gc.freeze()  # what the collection has made stays: looking through it takes half a second


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries tell what nobody has freed


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
