"""torch's names mean our classes inside of a block, and torch's again behind it."""

import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch.distributed import fsdp, optim
from torch.nn import parallel
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from trireme.integrations import in_place_of_torch

from harness.ranks import run_ranks

TORCHS = (
    parallel.DistributedDataParallel,
    parallel.distributed.DistributedDataParallel,
    fsdp.fully_shard,
    optim.ZeroRedundancyOptimizer,
)


def found() -> tuple[Any, ...]:
    return (
        parallel.DistributedDataParallel,
        parallel.distributed.DistributedDataParallel,
        fsdp.fully_shard,
        optim.ZeroRedundancyOptimizer,
    )


def ours() -> tuple[Any, ...]:
    ddp = trireme.DistributedDataParallel
    return (ddp, ddp, trireme.fully_shard, trireme.ZeroRedundancyOptimizer)


def test_names_inside_and_behind() -> None:
    with in_place_of_torch():
        assert found() == ours()
        with in_place_of_torch():
            assert found() == ours()
        assert found() == ours()
    assert found() == TORCHS


def test_an_exception_puts_them_back() -> None:
    with pytest.raises(KeyError), in_place_of_torch():
        raise KeyError
    assert found() == TORCHS


def test_blocks_of_two_threads() -> None:
    """The block that began first ends first."""
    inside, ended = threading.Event(), threading.Event()

    def other() -> None:
        with in_place_of_torch():
            inside.set()
            assert ended.wait(30)
            seen.append(found())

    seen: list[Any] = []
    thread = threading.Thread(target=other)
    with in_place_of_torch():
        thread.start()
        assert inside.wait(30)
    ended.set()
    thread.join(30)
    assert seen == [ours()] and found() == TORCHS


def test_what_torch_imports_meanwhile_means_torchs_classes() -> None:
    """Such a module asks whether a model is in torch's class, as ours is, too."""
    name = "torch.distributed._composable.replicate"
    before = sys.modules.pop(name, None)
    try:
        with in_place_of_torch():
            __import__(name)
        assert sys.modules[name].DistributedDataParallel is TorchDDP
    finally:
        if before is not None:
            sys.modules[name] = before


def parallelize(model: torch.nn.Module) -> torch.nn.Module:
    """As programs of TorchTitan do it: torch's function is looked up when it is needed."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(rank: int) -> list[float]:
    dist.init_process_group("trireme")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    plain.load_state_dict(model.state_dict())
    with in_place_of_torch():
        parallelize(model)
        wrapped = parallel.DistributedDataParallel(plain)
    assert isinstance(model, trireme.FSDPModule)
    assert type(wrapped) is trireme.DistributedDataParallel
    sides = [(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (model, wrapped)]
    losses = []
    for step in range(3):
        made = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 6, generator=made)
        for one, optimizer in sides:
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_program_that_names_torchs_function() -> None:
    for losses in run_ranks(train, 2, timeout=60, fresh=True):
        assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-5)
