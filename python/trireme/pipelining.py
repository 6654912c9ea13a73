"""Names of torch.distributed.pipelining and torchgpipe for our pipelines: a program changes its
imports."""

from typing import TYPE_CHECKING, Any

from torch.distributed import pipelining as _torchs
from torch.distributed.pipelining import Pipe, SplitPoint, pipe_split, pipeline
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from trireme._C import is_checkpointing, is_recomputing
from trireme._pipeline.balance import balance_by_size, balance_by_time, balance_cost
from trireme._pipeline.deferred_batch_norm import DeferredBatchNorm
from trireme._pipeline.gpipe import GPipe
from trireme._pipeline.skips import Namespace, Skippable, pop, skippable, stash
from trireme._pipeline.torch_runtime import _PipelineScheduleRuntime
from trireme._pipeline.torch_schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from trireme._pipeline.torch_stage import PipelineStage, PipelineStageInfo, build_stage
from trireme._pipeline.verify_skippables import verify_skippables

if TYPE_CHECKING:  # torch 2.11 has none of these
    from torch.distributed.pipelining import (
        PipelineActivationLiveness,
        analyze_pipeline_activation_liveness,
    )

__all__ = [
    "DeferredBatchNorm",
    "GPipe",
    "Namespace",
    "Pipe",
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "PipelineStageInfo",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "Skippable",
    "SplitPoint",
    "TensorChunkSpec",
    "_PipelineScheduleRuntime",
    "analyze_pipeline_activation_liveness",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "build_stage",
    "get_schedule_class",
    "is_checkpointing",
    "is_recomputing",
    "merge_chunks",
    "pipe_split",
    "pipeline",
    "pop",
    "skippable",
    "split_args_kwargs_into_chunks",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "stash",
    "verify_skippables",
]
if not TYPE_CHECKING:
    __all__ = [name for name in __all__ if name in globals() or hasattr(_torchs, name)]


def __getattr__(name: str) -> Any:
    if name in ("PipelineActivationLiveness", "analyze_pipeline_activation_liveness"):
        return getattr(_torchs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Users import them from here, and so they are printed and pickled.
for _one in (
    GPipe,
    PipelineStage,
    _PipelineScheduleRuntime,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
):
    _one.__module__ = __name__
