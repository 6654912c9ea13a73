"""What a caller can get wrong, each with its message in the house form."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.ranks import HOUSE_FORM, RANKLESS_FORM, mlp, on_ranks, raises


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def meta_buffer() -> nn.Module:
    module: Any = batch_norm()
    module[1].running_mean = torch.ones(2, device="meta")
    return module


# What is wrapped, the options, what is raised and what the text says.
CASES: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "no module": (lambda: "mlp", {}, TypeError, ["got str as module", "torch.nn.Module"]),
    "a class": (lambda: nn.Linear, {}, TypeError, ["got type as module"]),
    "no parameters": (nn.Tanh, {}, RuntimeError, ["without trainable parameters"]),
    "all frozen": (
        lambda: mlp().requires_grad_(False),
        {},
        RuntimeError,
        ["without trainable parameters", "Use the module as it is"],
    ),
    "several devices": (
        half_on_meta,
        {},
        ValueError,
        ["several kinds of device", "'0.weight' on cpu", "'1.weight' on meta"],
    ),
    "lazy": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)),
        {},
        RuntimeError,
        ["lazy parameter '1.weight'", "Run one forward before wrapping"],
    ),
    "meta buffer": (
        meta_buffer,
        {},
        RuntimeError,
        ["buffer '1.running_mean' on the meta device", "before wrapping"],
    ),
    "torch's SyncBatchNorm": (
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm()),
        {},
        ValueError,
        ["SyncBatchNorm at '1' on the CPU", "trireme.SyncBatchNorm.convert_sync_batchnorm(module)"],
    ),
    "torch's around": (
        lambda: TorchDDP(mlp()),
        {},
        ValueError,
        ["got torch's DistributedDataParallel at ''", "trireme.DistributedDataParallel, too"],
    ),
    "group": (mlp, {"process_group": "world"}, TypeError, ["got str as process_group"]),
    "mesh": (mlp, {"device_mesh": "cpu"}, TypeError, ["'cpu' as device_mesh", "1-D DeviceMesh"]),
    "device ids": (mlp, {"device_ids": [0]}, ValueError, ["device_ids [0]", "cpu", "Leave both"]),
    "two ids": (mlp, {"device_ids": [0, 1]}, ValueError, ["[0, 1]", "one rank per device"]),
    "output": (mlp, {"output_device": 1}, ValueError, ["output_device 1", "expected None"]),
    "cap 0": (mlp, {"bucket_cap_mb": 0}, ValueError, ["bucket cap of 0 MiB", "positive"]),
    "cap -1": (mlp, {"bucket_cap_mb": -1.5}, ValueError, ["bucket cap of -1.5 MiB"]),
    "cap text": (mlp, {"bucket_cap_mb": "25"}, TypeError, ["got str as bucket cap"]),
    "cap nan": (mlp, {"bucket_cap_mb": float("nan")}, ValueError, ["bucket cap of nan"]),
    "caps": (mlp, {"bucket_cap_mb_list": [1, 0]}, ValueError, ["bucket cap of 0 MiB"]),
    "delayed": (
        mlp,
        {"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))},
        ValueError,
        ["delay_all_reduce_named_params", "both or neither"],
    ),
}


# What is found out before the group is known.
GROUPLESS = {"no module", "a class", "group", "mesh"}


@pytest.mark.parametrize("name", CASES)
@on_ranks(1)
def test_arguments(rank: int, name: str) -> None:
    make, options, kind, parts = CASES[name]
    form = RANKLESS_FORM if name in GROUPLESS else HOUSE_FORM
    with raises(kind, "[ddp] got ", ", expected ", *parts, form=form):
        trireme.DistributedDataParallel(make(), **options)


@on_ranks(2)
def test_group_and_mesh_at_once(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    got = "[ddp] got both process_group and device_mesh"
    with raises(RuntimeError, got, form=RANKLESS_FORM):
        trireme.DistributedDataParallel(mlp(), process_group=dist.group.WORLD, device_mesh=mesh)
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with raises(RuntimeError, "as device_mesh", "1-D DeviceMesh", form=RANKLESS_FORM):
        trireme.DistributedDataParallel(mlp(), device_mesh=square)


@on_ranks(2)
def test_a_group_of_others(rank: int) -> None:
    group = dist.new_group([0])
    if rank == 1:
        got = "[ddp] got a process group without rank 1"
        with raises(ValueError, got, form=RANKLESS_FORM):
            trireme.DistributedDataParallel(mlp(), process_group=group)
    else:
        trireme.DistributedDataParallel(mlp(), process_group=group)


@on_ranks(1)
def test_before_init(rank: int) -> None:
    dist.destroy_process_group()
    parts = ("[ddp] got no process group", "Call trireme.init() first.")
    with raises(ValueError, *parts, form=RANKLESS_FORM):
        trireme.DistributedDataParallel(mlp())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@on_ranks(1)
def test_warnings_of_what_has_no_effect(rank: int) -> None:
    with pytest.warns(FutureWarning, match="check_reduction has no effect"):
        trireme.DistributedDataParallel(mlp(), check_reduction=True)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"skip_all_reduce_unused_params": True},
        {"batched_grad_copy": True},
        {"lazy_bucket_allocation": True},
        {"forward_sync_buffers": False},
        {"dim": 1},
        {"device_ids": []},
    ],
    ids=str,
)
@on_ranks(2)
def test_options_that_are_accepted(rank: int, options: dict[str, Any]) -> None:
    """With every one of them gradients are averages."""
    ddp = trireme.DistributedDataParallel(nn.Linear(1, 1), **options)
    for name, value in options.items():
        assert getattr(ddp, name, value) == value or value == []
    ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
    assert ddp.module.weight.grad.item() == 1.5


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


@on_ranks(2)
def test_a_parameter_that_lies_in_another_order_on_one_rank(rank: int) -> None:
    """Gradients travel as they lie in memory, so elements of others would be added up."""
    module = nn.Conv2d(2, 3, 2)
    if rank == 1:
        module = module.to(memory_format=torch.channels_last)
    expected = "on rank 1: parameter 0 is 'weight' Float [3, 2, 2, 2] of strides [8, 1, 4, 2] but"
    with raises(RuntimeError, expected):
        trireme.DistributedDataParallel(module)


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
