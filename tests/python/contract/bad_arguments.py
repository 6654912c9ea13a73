"""What a caller can get wrong: a program that raises, one entry each; refusals.py has our texts.

It gets names of torch, or ours. Both ranks of two run each entry, and none of them leaves anything
on its way between the ranks. Torch's classes refuse it by a check of their own, but for what
refusals.ALONE has with its type.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel, gather, parallel_apply
from torch.optim import LBFGS, SGD, AdamW, SparseAdam
from torch.testing._internal.two_tensor import TwoTensor

Api = SimpleNamespace
Case = Callable[[Any], object]

THEIRS = Api(
    DDP=DistributedDataParallel,
    Zero=ZeroRedundancyOptimizer,
    fully_shard=fully_shard,
    SyncBatchNorm=nn.SyncBatchNorm,
    gather=gather,
    parallel_apply=parallel_apply,
    clip_grad_norm_=nn.utils.clip_grad_norm_,
    optim=torch.optim,
)
OURS = Api(
    DDP=trireme.DistributedDataParallel,
    Zero=trireme.ZeroRedundancyOptimizer,
    fully_shard=trireme.fully_shard,
    SyncBatchNorm=trireme.SyncBatchNorm,
    gather=trireme.gather,
    parallel_apply=trireme.parallel_apply,
    clip_grad_norm_=trireme.clip_grad_norm_,
    optim=trireme.optim,
)


def net(*layers: nn.Module) -> Any:
    return nn.Sequential(*(layers or (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))))


def holding(parameter: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(parameter)
    return module


def meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def mesh(*sizes: int, named: bool = True) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]) * named or None)


def ones() -> torch.Tensor:
    return torch.ones(2, 4)


# --- DistributedDataParallel ---------------------------------------------------------------------


def same(state, bucket):  # type: ignore[no-untyped-def]  # an annotation would be checked
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def of_int(state: object, bucket: int) -> None: ...


def to_int(state, bucket) -> int: ...  # type: ignore[no-untyped-def,empty-body]


def hooked(api: Api, *hooks: Any) -> None:
    ddp = api.DDP(net())
    for hook in hooks:
        ddp.register_comm_hook(None, hook)


def wrapped(call: Callable[[Any], object], **options: Any) -> Case:
    return lambda api: call(api.DDP(net(), **options))


def meta_buffer() -> nn.Module:
    module = net(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].running_mean = torch.ones(2, device="meta")
    return module


DDP: dict[str, Case] = {
    "no module": lambda api: api.DDP("mlp"),
    "a class": lambda api: api.DDP(nn.Linear),
    "torch's around": lambda api: api.DDP(DistributedDataParallel(net())),
    "meta buffer": lambda api: api.DDP(meta_buffer()),
    "mesh": wrapped(id, device_mesh="cpu"),
    "cap 0": wrapped(id, bucket_cap_mb=0),
    "cap -1": wrapped(id, bucket_cap_mb=-1.5),
    "cap text": wrapped(id, bucket_cap_mb="25"),
    "cap nan": wrapped(id, bucket_cap_mb=float("nan")),
    "caps": wrapped(id, bucket_cap_mb_list=[1, 0]),
    "delayed alone": wrapped(id, param_to_hook_all_reduce=nn.Parameter(torch.ones(1))),
    "group and mesh": lambda api: api.DDP(
        net(), process_group=dist.group.WORLD, device_mesh=mesh(2)
    ),
    "mesh of two dimensions": lambda api: api.DDP(net(), device_mesh=mesh(2, 1)),
    "frozen": lambda api: api.DDP(net().requires_grad_(False)),
    "no parameters": lambda api: api.DDP(nn.Tanh()),
    "two ids": wrapped(id, device_ids=[0, 1]),
    "ids on the CPU": wrapped(id, device_ids=[0]),
    "output on the CPU": wrapped(id, output_device=1),
    "several devices": lambda api: api.DDP(net(nn.Linear(2, 2), meta())),
    "several devices, meta first": lambda api: api.DDP(net(meta(), nn.Linear(2, 2))),
    "meta": lambda api: api.DDP(meta()),
    "lazy": lambda api: api.DDP(net(nn.Linear(2, 2), nn.LazyLinear(2))),
    "group of another kind": wrapped(id, process_group="world"),
    "SyncBatchNorm on the CPU": lambda api: api.DDP(net(nn.Tanh(), nn.SyncBatchNorm(4))),
    "hook of no kind": lambda api: hooked(api, 1),
    "hook of other buckets": lambda api: hooked(api, of_int),
    "hook to another result": lambda api: hooked(api, to_int),
    "two hooks": lambda api: hooked(api, same, same),
    "builtin hook": wrapped(lambda ddp: ddp._register_builtin_comm_hook(1)),
    "buffer hook": wrapped(lambda ddp: ddp._register_buffer_comm_hook(None, 1)),
    "sample rate": wrapped(lambda ddp: ddp._set_ddp_runtime_logging_sample_rate(0)),
    "pickled over another group": lambda api: pickle.dumps(
        api.DDP(net(), process_group=dist.new_group([0, 1]))
    ),
    "nothing to finalize": wrapped(lambda ddp: ddp.finalize_backward()),
    "fused optimizer": wrapped(lambda ddp: ddp._register_fused_optim(torch.optim.Rprop, lr=0.1)),
    "join of two groups": lambda api: Join(
        [api.DDP(net()), api.DDP(net(), process_group=dist.new_group([0, 1]))]
    ),
    "join of nothing known": wrapped(lambda ddp: ddp.join(nothing=1)),
}

# --- ZeroRedundancyOptimizer ---------------------------------------------------------------------


def zero(api: Api, *parameters: Any, make: Any = SGD, **options: Any) -> Any:
    return api.Zero(parameters or net().parameters(), make, lr=0.1, **options)


def group_of(*parameters: torch.Tensor) -> dict[str, Any]:
    return {"params": list(parameters)}


def on(*devices: str) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, device=device)) for device in devices]


def added_twice(api: Api) -> None:
    (parameter,) = on("cpu")
    zero(api, group_of(parameter)).add_param_group(group_of(parameter))


ONE = nn.Parameter(torch.ones(2))

ZERO: dict[str, Case] = {
    "a method": lambda api: api.Zero(net().forward, SGD, lr=0.1),
    "an empty group": lambda api: zero(api, group_of()),
    "stage 0": lambda api: zero(api, stage=0),
    "stage 3": lambda api: zero(api, stage=3),
    "stage True": lambda api: zero(api, stage=True),
    "stage text": lambda api: zero(api, stage="2"),
    "overlap": lambda api: zero(api, overlap_with_ddp=True),
    "an instance": lambda api: zero(api, make=SGD(net().parameters())),
    "LBFGS": lambda api: zero(api, make=LBFGS),
    "SparseAdam": lambda api: zero(api, make=SparseAdam, stage=2),
    "placement": lambda api: zero(api, placement="flat"),
    "fused": lambda api: zero(api, make=AdamW, stage=2, fused_step=True),
    "meta": lambda api: zero(api, *on("meta")),
    "devices": lambda api: zero(api, *on("cpu", "meta")),
    "group": lambda api: zero(api, process_group="world"),
    "no_sync of stage 1": lambda api: zero(api).no_sync().__enter__(),
    "last step of stage 1": lambda api: zero(api).last_step(),
    "consolidated on rank 2": lambda api: zero(api).consolidate_state_dict(2),
    "consolidated on rank -1": lambda api: zero(api).consolidate_state_dict(-1),
    "a tensor": lambda api: api.Zero(ONE, SGD, lr=0.1),
    "a number": lambda api: api.Zero(3, SGD, lr=0.1),
    "nothing": lambda api: api.Zero([], SGD, lr=0.1),
    "parameters and groups": lambda api: zero(api, ONE, group_of(ONE)),
    "texts": lambda api: zero(api, "a"),
    "a group without parameters": lambda api: zero(api, {"lr": 0.1}),
    "sparse": lambda api: zero(api, nn.Parameter(torch.eye(3).to_sparse())),
    "lazy": lambda api: zero(api, *nn.LazyLinear(2).parameters()),
    "no leaf": lambda api: zero(api, ONE * 2),
    "twice": lambda api: zero(api, group_of(ONE), group_of(ONE)),
    "twice in a group": lambda api: zero(api, ONE, ONE),
    "no class": lambda api: zero(api, make="SGD"),
    "bad default": lambda api: zero(api, make=torch.optim.Adam, betas=(2, 2)),
    "unknown default": lambda api: zero(api, nothing=2),
    "not consolidated": lambda api: zero(api).state_dict(),
    "state of no groups": lambda api: zero(api).load_state_dict({"state": {}, "param_groups": []}),
    "state of other groups": lambda api: zero(api).load_state_dict(
        {"state": {}, "param_groups": [{"params": [0]}]}
    ),
    "added twice": added_twice,
    "added set": lambda api: zero(api).add_param_group({"params": {ONE}}),
    "added list": lambda api: zero(api).add_param_group([ONE]),
    "closure": lambda api: zero(api).step(3),
}

# --- fully_shard ---------------------------------------------------------------------------------


def sharded(api: Api) -> Any:
    module = net()
    api.fully_shard(module[0])
    return api.fully_shard(module)


def trained(api: Api) -> Any:
    module = sharded(api)
    module(ones()).sum().backward()
    return module


def inner_first(api: Api) -> None:
    module = sharded(api)
    module[0](ones())
    module(ones())


def two_roots(api: Api) -> None:
    module = net()
    api.fully_shard([module[0], module[2]])
    module(ones())


def tied(api: Api, *units: int) -> None:
    module = net(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    for unit in units:
        api.fully_shard(module[unit])
    api.fully_shard(module)(ones())


def shards(**options: Any) -> Case:
    return lambda api: api.fully_shard(net(), **options)


def averaged() -> nn.Module:
    return trireme.DistributedDataParallel(net())


def sharded_by_torch() -> Any:
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    return fully_shard(net(), mesh=gloo)


class Gathered(torch.Tensor):
    """Is like those of torchao, which are gathered in a form of their own."""

    def fsdp_pre_all_gather(self, *_: Any) -> Any:
        raise AssertionError("called")


def outer_first(api: Api) -> None:
    model = api.fully_shard(net())  # stays: its end is that of the outer unit
    api.fully_shard(model[0])


def optimizer_before(api: Api) -> None:
    module = net()
    optimizer = SGD(module.parameters(), lr=0.1)
    api.fully_shard(module)
    optimizer.step()


def assigned(api: Api) -> None:
    module = sharded(api)
    state = {name: parameter.full_tensor() for name, parameter in module.named_parameters()}
    module.load_state_dict(state, assign=True)
    module(ones())


def divided(factor: Any) -> Case:
    return lambda api: sharded(api).set_gradient_divide_factor(factor)


FSDP: dict[str, Case] = {
    "a text": lambda api: api.fully_shard("model"),
    "nothing": lambda api: api.fully_shard([]),
    "mesh": shards(mesh="cpu"),
    "offload_policy": shards(offload_policy="cpu"),
    "mp_policy": shards(mp_policy="bf16"),
    "placement 2": shards(shard_placement_fn=lambda _: Shard(2)),
    "a subclass": lambda api: api.fully_shard(holding(TwoTensor(ones(), ones()))),
    "a subclass that is gathered": lambda api: api.fully_shard(holding(Gathered(ones()))),
    "averaged": lambda api: api.fully_shard(averaged()),
    "averaged inside": lambda api: api.fully_shard(net(averaged())),
    "traced": lambda api: api.fully_shard(torch.jit.trace(net(), ones())),
    "torch's": lambda api: api.fully_shard(sharded_by_torch()),
    "outer first": outer_first,
    "optimizer of before": optimizer_before,
    "assigned": assigned,
    "factor 0.0": divided(0.0),
    "factor -1.0": divided(-1.0),
    "factor '2'": divided("2"),
    "factor True": divided(True),
    "a list": lambda api: api.fully_shard(nn.ModuleList([net()])),
    "a dict": lambda api: api.fully_shard(nn.ModuleDict({"a": net()})),
    "scripted": lambda api: api.fully_shard(torch.jit.script(net())),
    "scripted inside": lambda api: api.fully_shard(net(torch.jit.script(net()))),
    "mesh of three dimensions": lambda api: api.fully_shard(net(), mesh=mesh(2, 1, 1)),
    "reshard to a text": shards(reshard_after_forward="yes"),
    "reshard to a fraction": shards(reshard_after_forward=1.5),
    "reshard to 3": shards(reshard_after_forward=3),
    "reshard to 0": shards(reshard_after_forward=0),
    "placement Replicate": shards(shard_placement_fn=lambda _: Replicate()),
    "placement 5": shards(shard_placement_fn=lambda _: Shard(5)),
    "placement -5": shards(shard_placement_fn=lambda _: Shard(-5)),
    "twice": lambda api: api.fully_shard(api.fully_shard(net())),
    "sparse": lambda api: api.fully_shard(holding(torch.eye(3).to_sparse())),
    "lazy": lambda api: api.fully_shard(nn.LazyLinear(3)),
    "meta": lambda api: api.fully_shard(meta())(torch.ones(2, 2)),
    "tied to an inner unit": lambda api: tied(api, 0),
    "tied units": lambda api: tied(api, 0, 1),
    "inner unit first": inner_first,
    "two roots": two_roots,
    "plain state": lambda api: sharded(api).load_state_dict(net().state_dict()),
    "reshard later": lambda api: sharded(api).set_reshard_after_forward(1),
    "prefetch": lambda api: sharded(api).set_modules_to_forward_prefetch([nn.Tanh()]),
    "backward prefetch": lambda api: sharded(api).set_modules_to_backward_prefetch([nn.Tanh()]),
    "no buffers": lambda api: sharded(api).set_reduce_scatter_max_input_buffers(0),
    "buffers as text": lambda api: sharded(api).set_reduce_scatter_max_input_buffers("1"),
    "finalizing inside": lambda api: trained(api)[0].set_manual_backward_finalization(True),
    "reset inside": lambda api: trained(api)[0].reset_iter_state(),
    "nothing to finalize": lambda api: trained(api).finalize_backward(),
    "finalized inside": lambda api: trained(api)[0].finalize_backward(),
    "unknown forward": lambda api: fsdp.register_fsdp_forward_method(sharded(api), "nothing"),
}
if hasattr(fsdp, "DataParallelMeshDims"):
    Dims = fsdp.DataParallelMeshDims
    FSDP |= {
        "dims without names": lambda api: api.fully_shard(
            net(), mesh=mesh(2, 1, named=False), dp_mesh_dims=Dims(shard="a")
        ),
        "unknown dims": lambda api: api.fully_shard(
            net(), mesh=mesh(2, 1), dp_mesh_dims=Dims(shard="z")
        ),
        "dims for plain parameters": lambda api: api.fully_shard(
            net(), mesh=mesh(2, 1), dp_mesh_dims=Dims(shard="a")
        ),
        "dims without a mesh": shards(dp_mesh_dims=Dims(shard="a")),
    }

# --- SyncBatchNorm, clip_grad_norm_, functions of DataParallel -----------------------------------


def graded(value: float = 1.0, device: str = "cpu") -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, device=device))
    parameter.grad = torch.full_like(parameter, value)
    return parameter


REST: dict[str, Case] = {
    "norm of one dimension": lambda api: api.SyncBatchNorm(4)(torch.ones(4)),
    "norm of no channels": lambda api: api.SyncBatchNorm(0)(torch.ones(2, 0)),
    "norm of one dimension, eval": lambda api: api.SyncBatchNorm(4).eval()(torch.ones(4)),
    "norm of other channels": lambda api: api.SyncBatchNorm(4).eval()(torch.ones(2, 3)),
    "infinite": lambda api: api.clip_grad_norm_([graded(torch.inf)], 1.0, error_if_nonfinite=True),
    "foreach": lambda api: api.clip_grad_norm_([graded(device="meta")], 1.0, foreach=True),
    "norm_type": lambda api: api.clip_grad_norm_([graded()], 1.0, norm_type="x"),
    "other inputs": lambda api: api.parallel_apply([net()], []),
    "other kwargs": lambda api: api.parallel_apply([net()], [(1,)], [{}, {}]),
    "other devices": lambda api: api.parallel_apply([net()], [(1,)], [{}], [0, 0]),
    "other keys": lambda api: api.gather([{"a": ones()}, {}], "cpu"),
}

# --- Optimizers ----------------------------------------------------------------------------------

BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {
        "lr": -1.0,
        "eps": -1.0,
        "betas": (1.0, 0.9),
        "weight_decay": -1.0,
        "nothing": 1,
    },
    "SGD": {"lr": -1.0, "momentum": -1.0, "weight_decay": -1.0, "nesterov": True, "nothing": 1},
}
BAD_OPTIONS["AdamW"] = BAD_OPTIONS["Adam"]


def sparse_step(api: Api, name: str) -> None:
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = getattr(api.optim, name)(table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


def optimizer_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        f"sparse {name}": lambda api, name=name: sparse_step(api, name)
        for name in ("Adam", "AdamW")
    }
    for name, options in BAD_OPTIONS.items():
        calls: dict[str, Callable[[Any], object]] = {
            "texts": lambda kind: kind(["a"], lr=0.1),
            "nothing": lambda kind: kind([], lr=0.1),
            "a tensor": lambda kind: kind(ONE, lr=0.1),
            "no leaf": lambda kind: kind([ONE * 2], lr=0.1),
            "both": lambda kind: kind([ONE], lr=0.1, foreach=True, fused=True),
            "fused": lambda kind: kind([ONE], lr=0.1, fused=True, differentiable=True),
            "groups": lambda kind: kind([ONE]).load_state_dict({"state": {}, "param_groups": []}),
            "closure": lambda kind: kind([ONE]).step(3),
        }
        for option, value in options.items():
            calls[option] = lambda kind, given={option: value}: kind([ONE], **given)
        for case, call in calls.items():
            cases[f"{name} {case}"] = lambda api, name=name, call=call: call(
                getattr(api.optim, name)
            )
    return cases


TABLES = {"ddp": DDP, "zero": ZERO, "fsdp": FSDP, "rest": REST, "optim": optimizer_cases()}
