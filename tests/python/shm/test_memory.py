"""Tensors in memory that the ranks share, and windows on them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.faults import raises
from harness.leftovers import files_in_memory, left_in_memory
from harness.meeting import say, set_timeout, stay_until, until_inside
from harness.models import batch, mlp
from harness.on_ranks import on_shm_ranks
from harness.ranks import run_ranks
from harness.tensors import assert_bits
from shm.ranks import TORCH, backend_of, of_all, reduced, values

CPU = torch.device("cpu")
has_windows = pytest.mark.skipif(TORCH < (2, 15), reason="torch has windows since 2.15")


def allocate(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return backend_of().allocate_tensor(numel, dtype=dtype, device=CPU)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether this process maps it from memory of Trireme's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "memfd:trireme" in line
    return False


# --- Tensors --------------------------------------------------------------------------------------


@on_shm_ranks(3, fresh=True)
def test_tensors_of_the_group(rank: int) -> None:
    assert backend_of().supports_tensor_alloc(CPU)
    if rank != 1:  # a local call
        for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int64):
            tensor = allocate(1000, dtype)
            assert tensor.shape == (1000,) and tensor.dtype == dtype and is_shared(tensor)
        assert not is_shared(torch.empty(1000)) and allocate(0).numel() == 0
    for numel in (7, 300_000):
        mine = allocate(numel)
        mine.copy_(values(rank, numel, torch.float32))
        dist.all_reduce(mine)
        assert_bits(mine, reduced(ReduceOp.SUM, of_all(3, numel, torch.float32)))
    tensor = allocate(10).fill_(3)
    view = tensor[5:]
    del tensor
    grown = view.clone()
    assert torch.all(grown == 3) and is_shared(view)


@on_shm_ranks(1, fresh=True)
def test_memory_is_kept_for_the_next_tensor_of_its_size(rank: int) -> None:
    place = allocate(1_000_000).data_ptr()
    assert allocate(1_000_000).data_ptr() == place
    assert allocate(999_999).data_ptr() == place  # nearly the same size
    first = allocate(1_000_000)
    assert allocate(1_000_000).data_ptr() != first.data_ptr()
    files = len(os.listdir("/proc/self/fd"))
    for step in range(200):
        allocate(100_000 + 40_000 * step)
    kept = sum(
        os.stat(f"/proc/self/fd/{name}").st_size
        for name in os.listdir("/proc/self/fd")
        if "memfd:trireme" in os.path.realpath(f"/proc/self/fd/{name}")
    )
    assert kept < 300 * 2**20 and len(os.listdir("/proc/self/fd")) < files + 100


@on_shm_ranks(2)
def test_too_much_memory_is_an_error(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"needs \d+ bytes, free are \d+"):
        allocate(2**45)
    with pytest.raises((RuntimeError, ValueError)):
        allocate(-1)
    dist.all_reduce(torch.ones(1))


@on_shm_ranks(2, fresh=True)
def test_a_forked_child_gives_nothing_back(rank: int) -> None:
    """It maps the same pages; what it frees its parent may still use."""
    kept = allocate(100_000).data_ptr()
    mine = allocate(200_000).fill_(1)
    child = os.fork()
    if child == 0:
        mine = None
        again = [allocate(100_000), allocate(200_000)]
        for tensor in again:
            tensor.fill_(9)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.all(mine == 1)
    assert allocate(100_000).data_ptr() == kept


def use_and_die(rank: int) -> None:
    dist.init_process_group("trireme")
    allocate(1_000_000).fill_(1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_killed_processes() -> None:
    before = files_in_memory()
    run_ranks(use_and_die, 2, timeout=40, dying=(0, 1))
    assert not left_in_memory(before)


# --- FSDP -----------------------------------------------------------------------------------------


def train(rank: int, shared: bool, seen: list[bool]) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    model: nn.Module = mlp()
    for layer in model:
        fully_shard(layer, mesh=mesh) if list(layer.parameters()) else None
    fully_shard(model, mesh=mesh)
    if shared:
        for module in model.modules():
            if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)[rank::2]).square().mean().backward()
        optimizer.step()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore")
@on_shm_ranks(2, timeout=90, fresh=True)
def test_fsdp_takes_its_buffers_from_the_group(rank: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    mixin = collectives.ProcessGroupAllocMixin
    plain = mixin.allocate
    seen: list[bool] = []

    def allocate_and_look(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = plain(*args, **kwargs)
        seen.append(is_shared(tensor))
        return tensor

    mixin.allocate = allocate_and_look
    try:
        shared = train(rank, True, seen)
    finally:
        mixin.allocate = plain
    assert len(seen) >= 6 and all(seen)
    for ours, theirs in zip(shared, train(rank, False, []), strict=True):
        assert_bits(ours, theirs)


# --- Windows --------------------------------------------------------------------------------------


@has_windows
@on_shm_ranks(3, fresh=True)
def test_put_signal_and_wait(rank: int) -> None:
    mine = allocate(8).fill_(-1)
    window = dist.group.WORLD.new_window(mine)
    right, left = (rank + 1) % 3, (rank + 2) % 3
    for step in range(50):
        row = torch.full((2, 2), float(10 * step + rank)).t()
        window.put(row, right, 4 * (step % 2), False)
        window.signal(right, False)
        if step % 2:
            window.wait_signal(left, False)
        else:
            work = window.wait_signal(left, True)
            work.wait()
            assert work.is_completed()
        assert torch.all(mine[4 * (step % 2) : 4 * (step % 2) + 4] == 10 * step + left)
        window.signal(left, False)  # it was read
        window.wait_signal(right, False)
    dist.barrier()
    theirs = window.map_remote_tensor(right)
    assert torch.all(theirs[4:] == 490 + rank)
    theirs[0] = 77
    dist.barrier()
    assert mine[0] == 77 and window.map_remote_tensor(rank)[0] == 77
    window.tensor_deregister()
    with raises(ValueError, "without a tensor"):
        window.put(torch.ones(1), right, 0, False)
    # Another one, of another shape on each rank.
    other = allocate(2 * (rank + 1), torch.int64).view(rank + 1, 2).fill_(rank)
    window.tensor_register(other)
    del other
    dist.barrier()
    theirs = window.map_remote_tensor(right)
    assert theirs.shape == (right + 1, 2) and torch.all(theirs == right)
    del window
    dist.barrier()
    assert torch.all(theirs == right)  # lives as long as somebody maps it


@has_windows
@on_shm_ranks(2, timeout=40, fresh=True)
def test_what_a_window_cannot_do(rank: int) -> None:
    group = dist.group.WORLD
    for odd, part in (
        (torch.ones(4), "a tensor in private memory"),
        (allocate(8)[::2], "a tensor with gaps"),
    ):
        window = group.new_window()
        with raises(dist.DistBackendError, f"a window got {part}"):
            window.tensor_register(odd if rank == 1 else allocate(4))
        window.tensor_register(allocate(4))
    with raises(ValueError, "put got 3 elements at 2, but the window of rank 1 holds 4"):
        window.put(torch.ones(3), 1, 2, False)
    with raises(ValueError, "put got 1 elements at -1"):
        window.put(torch.ones(1), 1, -1, False)
    with raises(ValueError, "put got Long, but the window of rank 0 holds Float"):
        window.put(torch.ones(1, dtype=torch.int64), 0, 0, False)
    for call in (window.signal, window.wait_signal):
        with raises(ValueError, "got rank 2"):
            call(2, False)
    with raises(ValueError, "put got rank -1"):
        window.put(torch.ones(1), -1, 0, False)
    dist.barrier()


@has_windows
@on_shm_ranks(2, timeout=40, dying=[1])
def test_a_signal_of_a_killed_rank(rank: int) -> None:
    window = dist.group.WORLD.new_window(allocate(4))
    dist.barrier()
    if rank == 1:
        until_inside(0, "the signal of a window from rank 1")
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(dist.DistBackendError, "the signal of a window from rank 1", "has died"):
        window.wait_signal(1, False)
    with raises(dist.DistBackendError, "has died"):
        window.signal(1, False)


@has_windows
@on_shm_ranks(2, timeout=40)
def test_a_signal_that_does_not_come(rank: int) -> None:
    window = dist.group.WORLD.new_window()
    if rank == 1:
        return stay_until("done")
    set_timeout(1)
    with raises(dist.DistBackendError, "the signal of a window from rank 1", "within 1 s"):
        window.wait_signal(1, False)
    say("done")
