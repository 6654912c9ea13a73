"""The arguments of torch's class; contract/bad_arguments.py has those that are refused."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.models import mlp
from harness.on_ranks import on_ranks


@on_ranks(1)
def test_warnings_of_what_has_no_effect(rank: int) -> None:
    with pytest.warns(FutureWarning, match="check_reduction has no effect"):
        trireme.DistributedDataParallel(mlp(), check_reduction=True)


ACCEPTED: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"skip_all_reduce_unused_params": True},
    {"batched_grad_copy": True},
    {"lazy_bucket_allocation": True},
    {"forward_sync_buffers": False},
    {"dim": 1},
    {"device_ids": []},
]


@on_ranks(2)
def test_options_that_are_accepted(rank: int) -> None:
    """With every one of them gradients are averages."""
    for options in ACCEPTED:
        ddp = trireme.DistributedDataParallel(nn.Linear(1, 1), **options)
        for name, value in options.items():
            assert getattr(ddp, name, value) == value or value == [], name
        ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
        assert ddp.module.weight.grad.item() == 1.5, options


@on_ranks(2)
def test_delayed_parameters_are_averaged_like_all(rank: int) -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(module[0].weight)
    nn.init.ones_(module[1].weight)
    delayed = [("1.weight", module[1].weight)]
    ddp = trireme.DistributedDataParallel(
        module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[0].weight
    )
    ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
    assert [layer.weight.grad.item() for layer in module] == [1.5, 1.5]


def test_the_signature_is_torchs() -> None:
    """Torch's own where it is older has fewer parameters, in the same places."""
    ours = inspect.signature(trireme.DistributedDataParallel).parameters
    for number, theirs in enumerate(inspect.signature(TorchDDP).parameters.values()):
        mine = list(ours.values())[number]
        assert (mine.name, mine.kind) == (theirs.name, theirs.kind)
        # Once True, now None with the same meaning.
        assert mine.default == theirs.default or mine.name == "broadcast_buffers"


@on_ranks(1)
def test_it_is_what_torch_looks_for(rank: int) -> None:
    """isinstance, and the attributes that other libraries read."""
    ddp = trireme.DistributedDataParallel(mlp())
    assert isinstance(ddp, TorchDDP)
    reference = TorchDDP(mlp())
    for name in ("device_ids", "output_device", "device", "device_type", "dim", "bucket_bytes_cap",
                 "require_backward_grad_sync", "static_graph", "find_unused_parameters",
                 "gradient_as_bucket_view", "broadcast_buffers", "is_multi_device_module",
                 "broadcast_bucket_size", "parameters_to_ignore", "training"):  # fmt: skip
        assert getattr(ddp, name) == getattr(reference, name), name
    assert ddp.module is not None and ddp.process_group is dist.group.WORLD
    assert TorchDDP._get_active_ddp_module() is None
    seen = []
    ddp.module[0].register_forward_hook(lambda *_: seen.append(TorchDDP._get_active_ddp_module()))
    ddp(torch.ones(1, 6))
    assert seen == [ddp]
