"""torch's PipelineStage, which our schedules and torch's drive, and where its module is called."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as _TorchStage
from torch.distributed.pipelining import stage as _stages
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStage, _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from trireme._core.owners import optimizer_of, unit_of
from trireme._pipeline import refuse

if TYPE_CHECKING or hasattr(_stages, "PipelineStageInfo"):
    from torch.distributed.pipelining import PipelineStageInfo as PipelineStageInfo
else:  # torch 2.11 has none

    @dataclass(frozen=True, kw_only=True)
    class PipelineStageInfo:
        """Says which call of a stage a forward context is entered for."""

        stage_index: int
        microbatch_index: int
        is_metadata_inference: bool = False


_Context = Callable[[PipelineStageInfo], AbstractContextManager[Any]]
_Examples = Tensor | tuple[Tensor | None, ...] | None
_SCHEDULES = _PipelineSchedule.__module__
_ZERO_2 = "a ZeroRedundancyOptimizer of stage 2"
_HALVES = (_ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT)
_HAS_CONTEXTS = hasattr(_PipelineStageBase, "register_forward_context")


class _Contexts:
    """Gives stages of a torch that has no forward contexts what torch 2.15 has."""

    stage_index: int

    def register_forward_context(self, context_factory: _Context) -> RemovableHandle:
        """Enters what ``context_factory`` returns around each forward of the stage.

        Returns:
            A handle whose ``remove()`` ends that.

        Raises:
            RuntimeError: there is one already.
        """
        held: OrderedDict[int, _Context] = self.__dict__.setdefault(
            "_forward_contexts", OrderedDict()
        )
        if held:
            refuse("got a second forward context of a stage", "Remove the first one.",
                   kind=RuntimeError)  # fmt: skip
        handle = RemovableHandle(held)
        held[handle.id] = context_factory
        return handle

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Is what schedules of torch call."""
        inner: Any = super()
        return _in_context(
            self, fwd_chunk_id, lambda: inner.forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        )


if TYPE_CHECKING or _HAS_CONTEXTS:

    class _HasContexts:
        """torch's stages have forward contexts."""

else:
    _HasContexts = _Contexts


class _OfTorch(_HasContexts):
    """What schedules of torch, and not ours, call of a stage."""

    def clear_runtime_states(self) -> None:
        """Is how torch's schedules begin a step."""
        inner: Any = super()
        _refuse_strategies(self)
        inner.clear_runtime_states()


class PipelineStage(_OfTorch, _TorchStage):
    """One stage of a pipeline whose schedule is one of ``trireme.pipelining``, or of torch.

    A tuple that ``submodule`` returns becomes the positional arguments of the next stage; all else
    is one argument: a tensor of any dtype, a dict, a dataclass, a number. Shapes may differ from
    micro-batch to micro-batch.

    Args:
        submodule: The layers of the stage.
        stage_index: Its number, from 0 on.
        num_stages: How many stages the pipeline has.
        device: Where the layers are.
        input_args, output_args, output_grads, input_grads: Examples for schedules of torch, which
            fix shapes beforehand. Our schedules read none: each message says what it holds.
        group: The ranks of the pipeline; None for all.
        dw_builder: For layers that compute gradients of their weights themselves, later than
            autograd runs their backward. After each backward it is asked for a function, which is
            called where gradients of weights are due.
        get_mesh: For schedules of torch with DTensors.

    Raises:
        ValueError: a number that is out of range.
        RuntimeError: more ranks than stages.
        NotImplementedError: an argument that the installed torch does not know.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: _Examples = None,
        output_args: _Examples = None,
        output_grads: _Examples = None,
        input_grads: _Examples = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Callable[..., Any] | None = None,
    ) -> None:
        given = {
            "input_args": input_args,
            "output_args": output_args,
            "output_grads": output_grads,
            "input_grads": input_grads,
            "group": group,
            "dw_builder": dw_builder,
            "get_mesh": get_mesh,
        }
        known = inspect.signature(_TorchStage.__init__).parameters
        for name in set(given) - set(known):
            if given.pop(name) is not None:
                got = f"got {name}=, which torch {torch.__version__} does not know"
                refuse(got, "Leave it out.", kind=NotImplementedError)
        make: Any = super().__init__
        make(submodule, stage_index, num_stages, device, **given)


class _TracedStage(_OfTorch, _PipelineStage):
    """A stage of a traced pipeline."""


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: Any,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStage:
    """Makes a stage of a traced pipeline.

    Args:
        stage_module: ``pipe.get_stage_module(stage_index)``, perhaps wrapped.
        stage_index: Its number, from 0 on.
        pipe_info: What ``pipe.info()`` returns.
        device: Where it is to run; it is moved there.
        group: The ranks of the pipeline; None for all.
    """
    return _TracedStage(stage_module, stage_index, pipe_info, device, group)


def is_traced(stage: _PipelineStageBase) -> bool:
    """Says whether a stage was cut out of a traced module."""
    return isinstance(stage, _PipelineStage)


def _refuse_strategies(stage: Any) -> None:
    """Refuses what torch's schedules would average wrongly, before a message is sent."""
    if not stage.has_backward:
        return
    strategy = _strategy_of(stage.submod)
    if strategy is None:
        return
    schedule = _schedule_that_calls()
    if strategy == _ZERO_2:
        # No schedule of torch says which backward is the last, and all divide gradients of which
        # a rank has its shards only.
        got, otherwise = "", ", or take stage=1"
    elif stage.dw_builder is None and _has_halves(schedule):
        got, otherwise = ", by backwards in two halves, which go past it", ""
    else:
        return
    mro = type(schedule).__mro__
    name = next((cls.__name__ for cls in mro if cls.__module__ == _SCHEDULES), "schedule")
    refuse(f"got torch's {name} over stage {stage.stage_index}, with {strategy}{got}",
           f"Import {name} from trireme.pipelining{otherwise}.",
           rank=stage.group_rank, world=stage.group_size,
           kind=NotImplementedError)  # fmt: skip


def _strategy_of(module: nn.Module) -> str | None:
    """Says what averages gradients of a stage, if that needs help from the schedule."""
    for parameter in module.parameters():
        optimizer = optimizer_of(parameter)
        if optimizer is not None and optimizer.stage == 2:
            return _ZERO_2
        if unit_of(parameter) is not None:
            return "trireme.fully_shard"
    if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
        return "DistributedDataParallel"
    return None


def _schedule_that_calls() -> _PipelineSchedule | None:
    """Returns the schedule of torch that runs on this thread."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        schedule = frame.f_locals.get("self")
        if isinstance(schedule, _PipelineSchedule):
            return schedule
    return None


def _has_halves(schedule: _PipelineSchedule | None) -> bool:
    tables = ("pipeline_order", "pipeline_order_with_comms")
    rows = (row for name in tables for row in (getattr(schedule, name, None) or {}).values())
    return any(
        action is not None and action.computation_type in _HALVES for row in rows for action in row
    )


def call_submod(
    stage: _PipelineStageBase, micro_batch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls the module of a stage: all forwards of our schedules come through here."""
    return _in_context(stage, micro_batch, lambda: stage.submod(*args, **kwargs))


def _in_context(stage: Any, micro_batch: int, forward: Callable[[], Any]) -> Any:
    contexts = getattr(stage, "_forward_contexts", None)
    if not contexts:
        return forward()
    info = PipelineStageInfo(stage_index=stage.stage_index, microbatch_index=micro_batch)
    (factory,) = contexts.values()
    results = []
    with factory(info):
        results.append(forward())
    if not results:
        got = f"got a forward context of stage {stage.stage_index} that swallowed an exception"
        refuse(got, "Let it pass.", kind=RuntimeError)
    return results[0]
