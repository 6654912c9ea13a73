"""Trireme trains torch models in parallel: one C++ core, used from Python and from C++."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trireme._core.load_core import load_core

_C = load_core()

import torch  # noqa: E402

__version__: str = import_module("trireme._build_info").VERSION

from trireme._launch.shm_backend import register  # noqa: E402

register()

from trireme import compression, optim  # noqa: E402
from trireme.clip_grad import clip_grad_norm_  # noqa: E402
from trireme.ddp import DistributedDataParallel  # noqa: E402
from trireme.host_writing import writing  # noqa: E402
from trireme.launch import Context, init, shutdown  # noqa: E402
from trireme.memory_estimate import MemoryBytes, MemoryEstimate, estimate_memory  # noqa: E402
from trireme.ranks import all_mean, get_logger, rank_generator  # noqa: E402
from trireme.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm  # noqa: E402

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.join import Join, Joinable, JoinHook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
        HierarchicalModelAverager,
    )
    from torch.distributed.optim import (
        DistributedOptimizer,
        PostLocalSGDOptimizer,
        as_functional_optim,
    )

    from trireme._activation.activation_cache import ActivationCache, CachedPrefix
    from trireme._activation.activation_costs import LayerCost, measure_activations
    from trireme._activation.checkpoint import (
        CheckpointError,
        CheckpointPolicy,
        SelectiveCheckpointContext,
        checkpoint,
        create_selective_checkpoint_contexts,
        noop_context_fn,
        set_checkpoint_debug_enabled,
        set_checkpoint_early_stop,
    )
    from trireme._activation.checkpoint_plan import CheckpointPlan, checkpoint_plan
    from trireme._activation.checkpoint_sequential import checkpoint_sequential
    from trireme._data_parallel.coalesced import broadcast_coalesced, reduce_add_coalesced
    from trireme._data_parallel.parallel_apply import data_parallel, parallel_apply
    from trireme._data_parallel.replicate import replicate
    from trireme._pipeline.deferred_batch_norm import (
        DeferredBatchNorm,
        convert_deferred_batch_norm,
    )
    from trireme._pipeline.losses import CollectedLosses, collect_losses, pipeline_loss
    from trireme._pipeline.measure import MeasuredLayer, measure_layers
    from trireme._pipeline.pipeline import Pipeline
    from trireme._pipeline.place import place
    from trireme._pipeline.schedule import (
        ElasticPlan,
        PipelineAction,
        PipelineSchedule,
        elastic_plan,
        partition,
        pipeline_schedule,
    )
    from trireme._pipeline.skips import Namespace, pop, skippable, stash
    from trireme._saving.checkpoint import load_checkpoint, save_checkpoint
    from trireme._saving.checkpoints import Checkpoints, LoadedStep
    from trireme._saving.global_batch import GlobalBatch
    from trireme._saving.pending_save import PendingSave
    from trireme._saving.redistribute import redistribute
    from trireme.dp import DataParallel
    from trireme.fsdp import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FSDPModule,
        GradientReductionHandle,
        MixedPrecisionPolicy,
        Offload,
        OffloadPolicy,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from trireme.local_sgd import DiLoCo, LocalSGD
    from trireme.pipetransformer import Freeze, FreezePoint, PipeTransformer, freeze_schedule
    from trireme.scatter_gather import gather, scatter, scatter_kwargs
    from trireme.zero import ZeroRedundancyOptimizer

del register


# Some are torch's own and stand there beside a name of ours: a program changes one import.
_LAZY = {
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook": (
        *("PostLocalSGDState", "post_localSGD_hook"),
    ),
    "torch.distributed.algorithms.join": ("Join", "JoinHook", "Joinable"),
    "torch.distributed.algorithms.model_averaging.averagers": ("PeriodicModelAverager",),
    "torch.distributed.algorithms.model_averaging.hierarchical_model_averager": (
        "HierarchicalModelAverager",
    ),
    "torch.distributed.optim": (
        *("DistributedOptimizer", "PostLocalSGDOptimizer", "as_functional_optim"),
    ),
    "trireme._activation.activation_cache": ("ActivationCache", "CachedPrefix"),
    "trireme._activation.activation_costs": ("LayerCost", "measure_activations"),
    "trireme._activation.checkpoint": (
        *("CheckpointError", "CheckpointPolicy", "SelectiveCheckpointContext", "checkpoint"),
        *("create_selective_checkpoint_contexts", "noop_context_fn"),
        *("set_checkpoint_debug_enabled", "set_checkpoint_early_stop"),
    ),
    "trireme._activation.checkpoint_plan": ("CheckpointPlan", "checkpoint_plan"),
    "trireme._activation.checkpoint_sequential": ("checkpoint_sequential",),
    "trireme._data_parallel.coalesced": ("broadcast_coalesced", "reduce_add_coalesced"),
    "trireme._data_parallel.parallel_apply": ("data_parallel", "parallel_apply"),
    "trireme._data_parallel.replicate": ("replicate",),
    "trireme._pipeline.deferred_batch_norm": ("DeferredBatchNorm", "convert_deferred_batch_norm"),
    "trireme._pipeline.measure": ("MeasuredLayer", "measure_layers"),
    "trireme._pipeline.pipeline": ("Pipeline",),
    "trireme._pipeline.place": ("place",),
    "trireme._pipeline.schedule": (
        *("ElasticPlan", "PipelineAction", "PipelineSchedule"),
        *("elastic_plan", "partition", "pipeline_schedule"),
    ),
    "trireme._pipeline.losses": ("CollectedLosses", "collect_losses", "pipeline_loss"),
    "trireme._pipeline.skips": ("Namespace", "pop", "skippable", "stash"),
    "trireme._saving.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "trireme._saving.checkpoints": ("Checkpoints", "LoadedStep"),
    "trireme._saving.global_batch": ("GlobalBatch",),
    "trireme._saving.pending_save": ("PendingSave",),
    "trireme._saving.redistribute": ("redistribute",),
    "trireme.dp": ("DataParallel",),
    "trireme.fsdp": (
        *("CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "GradientReductionHandle"),
        *("MixedPrecisionPolicy", "Offload", "OffloadPolicy", "UnshardHandle", "fully_shard"),
        *("register_fsdp_forward_method", "share_comm_ctx"),
    ),
    "trireme.local_sgd": ("DiLoCo", "LocalSGD"),
    "trireme.pipetransformer": ("Freeze", "FreezePoint", "PipeTransformer", "freeze_schedule"),
    "trireme.scatter_gather": ("gather", "scatter", "scatter_kwargs"),
    "trireme.zero": ("ZeroRedundancyOptimizer",),
}


def __getattr__(name: str) -> Any:
    """Imports when it is asked for what costs half a second, because torch's class does."""
    for module, names in _LAZY.items():
        if name in names:
            globals()[name] = found = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ActivationCache",
    "CPUOffloadPolicy",
    "CachedPrefix",
    "CheckpointError",
    "CheckpointPlan",
    "CheckpointPolicy",
    "Checkpoints",
    "CollectedLosses",
    "Context",
    "DataParallel",
    "DataParallelMeshDims",
    "DeferredBatchNorm",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ElasticPlan",
    "FSDPModule",
    "Freeze",
    "FreezePoint",
    "GlobalBatch",
    "GradientReductionHandle",
    "HierarchicalModelAverager",
    "Join",
    "JoinHook",
    "Joinable",
    "LayerCost",
    "LoadedStep",
    "LocalSGD",
    "MeasuredLayer",
    "MemoryBytes",
    "MemoryEstimate",
    "MixedPrecisionPolicy",
    "Namespace",
    "Offload",
    "OffloadPolicy",
    "PendingSave",
    "PeriodicModelAverager",
    "PipeTransformer",
    "Pipeline",
    "PipelineAction",
    "PipelineSchedule",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "SelectiveCheckpointContext",
    "SyncBatchNorm",
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
    "__version__",
    "all_mean",
    "as_functional_optim",
    "broadcast_coalesced",
    "checkpoint",
    "checkpoint_plan",
    "checkpoint_sequential",
    "clip_grad_norm_",
    "collect_losses",
    "compression",
    "convert_deferred_batch_norm",
    "convert_sync_batchnorm",
    "create_selective_checkpoint_contexts",
    "data_parallel",
    "elastic_plan",
    "estimate_memory",
    "freeze_schedule",
    "fully_shard",
    "gather",
    "get_logger",
    "init",
    "load_checkpoint",
    "measure_activations",
    "measure_layers",
    "noop_context_fn",
    "optim",
    "parallel_apply",
    "partition",
    "pipeline_loss",
    "pipeline_schedule",
    "place",
    "pop",
    "post_localSGD_hook",
    "rank_generator",
    "redistribute",
    "reduce_add_coalesced",
    "register_fsdp_forward_method",
    "replicate",
    "save_checkpoint",
    "scatter",
    "scatter_kwargs",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "share_comm_ctx",
    "shutdown",
    "skippable",
    "stash",
    "writing",
]
if not TYPE_CHECKING:  # what the installed torch may lack
    _is_2_15 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    _lacking = set() if _is_2_15 else {"DataParallelMeshDims", "GradientReductionHandle"}
    if not hasattr(torch._C, "_rpc_init"):
        _lacking.add("DistributedOptimizer")
    __all__ = [name for name in __all__ if name not in _lacking]
