"""What can be imported from ``trireme``."""

from importlib import import_module

import pytest
import torch
import trireme
import trireme.fsdp
import trireme.pipelining
from torch.distributed.fsdp import _fully_shard

# Whoever changes one import finds there what stood beside the name.
BESIDE = {
    "torch.distributed.algorithms.join": None,
    "torch.distributed.fsdp": _fully_shard.__all__,
    "torch.distributed.optim": None,
    "torch.nn.parallel": None,
}


@pytest.mark.parametrize("place", BESIDE)
def test_what_stands_beside_our_names_in_torch(place: str) -> None:
    theirs = import_module(place)
    for name in BESIDE[place] or theirs.__all__:
        ours, of_torch = getattr(trireme, name), getattr(theirs, name)
        is_class = isinstance(ours, type)
        assert ours is of_torch or not is_class or issubclass(ours, of_torch), name
        assert name in trireme.__all__, name


def test_every_public_name_is_there() -> None:
    assert len(set(trireme.__all__)) == len(trireme.__all__)
    for module in (trireme, trireme.fsdp, trireme.pipelining):
        for name in module.__all__:
            assert hasattr(module, name), name
    with pytest.raises(AttributeError, match="has no attribute 'FullyShardedDataParallel'"):
        trireme.FullyShardedDataParallel  # noqa: B018 - FSDP1 is none of ours
    with pytest.raises(AttributeError, match="has no attribute 'Schedule2F2B'"):
        trireme.pipelining.Schedule2F2B  # noqa: B018


def test_handles_are_torchs() -> None:
    trireme.init(device="cpu", set_threads=False)
    module = trireme.fully_shard(torch.nn.Linear(2, 2))
    handle = module.unshard(async_op=True)
    assert isinstance(handle, trireme.UnshardHandle)
    handle.wait()
    if hasattr(trireme, "GradientReductionHandle"):
        module.set_manual_backward_finalization(True)
        module(torch.ones(1, 2)).sum().backward()
        done = module.finalize_backward(async_op=True)
        assert isinstance(done, trireme.GradientReductionHandle)
        done.wait()
