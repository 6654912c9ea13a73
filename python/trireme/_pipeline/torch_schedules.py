"""torch's schedules: their classes and signatures, with our tables and our engine."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.pipelining import schedules as _torchs
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from trireme._pipeline import refuse
from trireme._pipeline.schedule import PipelineSchedule, pipeline_schedule
from trireme._pipeline.torch_runtime import _PipelineScheduleRuntime
from trireme._pipeline.torch_signature import as_in_torch
from trireme._pipeline.torch_steps import ArgsSpec, KwargsSpec, Loss, MergeSpec, Steps


class _Single(Steps):
    """A schedule with one stage per rank."""

    _form: str

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: MergeSpec = None,
        scale_grads: bool = True,
    ) -> None:
        if isinstance(stage, list | tuple):
            got = f"got {len(stage)} stages for {type(self).__name__}, which has one per rank"
            refuse(got, "Pass one stage, or take another schedule.", kind=AttributeError)
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self._begin([stage], n_microbatches, loss_fn, specs, scale_grads)
        self._stage = stage
        table = pipeline_schedule(self._form, ranks=self._num_stages, micro_batches=n_microbatches)
        self._use(_reordered(table, stage.stage_index_to_group_rank))


class ScheduleGPipe(_Single, _torchs.ScheduleGPipe):
    """All forwards, then all backwards; one stage per rank."""

    _form = "gpipe"


class Schedule1F1B(_Single, _torchs.Schedule1F1B):
    """A backward as soon as there can be one; one stage per rank."""

    _form = "1f1b"


class _Form(_PipelineScheduleRuntime):
    """A schedule of several stages per rank whose table has a name."""

    _form: str
    _splits_backward = False
    _is_v = False

    @as_in_torch(_torchs.ScheduleInterleaved1F1B.__init__)  # that of the others is the same
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self._splits_backward:
            _refuse_compiled(self._held, type(self).__name__)
        held = self.n_local_stages
        if self._is_v and held != 2:
            got = f"got {held} stages for {type(self).__name__}, expected 2 per rank"
            refuse(got, "Cut the model into twice as many stages as there are ranks.")
        if held * self.pp_group_size != self._num_stages:
            got = f"got {held} stages on each of {self.pp_group_size} ranks, expected "
            refuse(f"{got}{self._num_stages} in all", "Give each rank as many.")
        self._use(
            pipeline_schedule(
                self._form,
                ranks=self.pp_group_size,
                micro_batches=self._n_microbatches,
                stages_per_rank=held,
            )
        )


class ScheduleLoopedBFS(_Form, _torchs.ScheduleLoopedBFS):
    """All micro-batches through one stage of a rank, then through its next one."""

    _form = "looped-bfs"

    @as_in_torch(_torchs.ScheduleLoopedBFS.__init__)
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)


class ScheduleInterleaved1F1B(_Form, _torchs.ScheduleInterleaved1F1B):
    """1F1B where each rank has several stages."""

    _form = "interleaved-1f1b"


class ScheduleInterleavedZeroBubble(_Form, _torchs.ScheduleInterleavedZeroBubble):
    """Interleaved 1F1B whose backwards come in two halves (ZB1P)."""

    _form = "zb-h1"
    _splits_backward = True


class ScheduleZBVZeroBubble(_Form, _torchs.ScheduleZBVZeroBubble):
    """Two stages per rank, laid out as a V, with backwards in two halves (ZBV)."""

    _form = "zb-v"
    _splits_backward = True
    _is_v = True


class ScheduleDualPipeV(_Form, _torchs.ScheduleDualPipeV):
    """Two stages per rank, laid out as a V, with a forward beside each backward."""

    _form = "dualpipe-v"
    _splits_backward = True
    _is_v = True


_CLASSES: dict[str, type[Any]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[Any]:
    """Returns the class of that name, in any case.

    Raises:
        ValueError: an unknown name; those that there are are listed.
    """
    for name, found in _CLASSES.items():
        if name.lower() == schedule_name.lower():
            return found
    got = f"Unknown schedule name '{schedule_name}', expected one of {', '.join(_CLASSES)}"
    refuse(got, "Correct the name.")


def _reordered(table: PipelineSchedule, rank_of: dict[int, int]) -> PipelineSchedule:
    """Returns the table of one stage per rank with its rows on the ranks that stages have."""
    stages = {rank: stage for stage, rank in rank_of.items()}
    if sorted(stages) != list(range(table.ranks)) or len(rank_of) != table.ranks:
        return table  # the engine refuses ranks that do not fit
    if all(rank == stage for rank, stage in stages.items()):
        return table
    lines = table.to_csv().splitlines()
    return PipelineSchedule.from_csv("\n".join(lines[stages[rank]] for rank in range(table.ranks)))


def _refuse_compiled(stages: list[Any], name: str) -> None:
    for stage in stages:
        if isinstance(stage.submod, nn.Module):
            for module in stage.submod.modules():
                if isinstance(module, OptimizedModule):
                    got = f"got a compiled module in stage {stage.stage_index} for {name}"
                    refuse(f"{got}, whose backward comes in two halves",
                           "Take a schedule whose backward is whole.",
                           kind=RuntimeError)  # fmt: skip
