"""What every test starts from: no launcher around it, a fixed seed, no group of another test."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import trireme
from distributed import without_launcher


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


@pytest.fixture
def lone_rank() -> trireme.Context:
    """A run of one rank in this process, on the CPU."""
    return trireme.init(device="cpu", set_threads=False)
