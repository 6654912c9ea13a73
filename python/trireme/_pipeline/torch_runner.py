"""Runs the stages of torch's kind that a rank holds, on the engine of all pipelines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import _PipelineStageBase

from trireme import _C
from trireme._C import CallTurn, Communicator, PipelineEngine, PipelineStageRequest
from trireme._core.group_communicator import communicator_of
from trireme._core.nested import tensors_in
from trireme._core.sent_gradients import sends_gradients
from trireme._pipeline import AREA, refuse
from trireme._pipeline.agreement import agree
from trireme._pipeline.schedule import PipelineSchedule
from trireme._pipeline.skips import pair_skips
from trireme._pipeline.stages import HeldTensors, are_same, held_by, refuse_misplaced, with_causes
from trireme._pipeline.torch_calls import StepInputs, TorchStageCalls
from trireme._pipeline.torch_stage import is_traced


class StageRunner:
    """Runs the stages of this rank by a table, a step at a time.

    The engine is made at the first step, and anew where the table has become another one. Both,
    and each step, are collective over the group of the stages.
    """

    def __init__(self, stages: Sequence[Any], loss: Callable[..., Any] | None) -> None:
        self._stages = stages
        self._loss = loss
        self._communicator: Communicator | None = None
        self._turn: CallTurn | None = None
        self._calls: list[TorchStageCalls] = []
        self._core: PipelineEngine | None = None
        self._made_for: tuple[PipelineSchedule, bool] | None = None
        self._digest = ""
        self._seen: list[torch.nn.Parameter] = []

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank holds the last stage."""
        return any(stage.stage_index == stage.num_stages - 1 for stage in self._stages)

    def run(
        self,
        table: PipelineSchedule,
        scale_grads: bool,
        trains: bool,
        deal: Callable[[], StepInputs],
        synchronizes: bool = True,
    ) -> StepInputs:
        """Runs a step; ``deal`` returns what this rank gives to it.

        Returns:
            What ``deal`` returned, with losses and outputs on the rank of the last stage.

        Raises:
            Exception: what ``deal`` raised; ValueError on the other ranks.
        """
        communicator = self._meet()
        assert self._turn is not None
        with self._turn.of(self._core):
            return self._run_in_turn(communicator, (table, scale_grads, trains), deal, synchronizes)

    def _run_in_turn(
        self,
        communicator: Communicator,
        form: tuple[PipelineSchedule, bool, bool],
        deal: Callable[[], StepInputs],
        synchronizes: bool,
    ) -> StepInputs:
        table, scale_grads, trains = form
        if self._core is not None:
            self._core.recover()
        else:
            communicator.recover()
        error, inputs = None, StepInputs()
        made_for = (table, scale_grads)
        try:
            if self._made_for is None or self._made_for[0] is not table:
                self._digest = hashlib.sha256(table._core.table().encode()).hexdigest()
            if not self._calls:
                self._calls = self._calls_of_stages()
            inputs = deal()
            if self._core is not None:
                self._look_at_parameters(self._core)  # it says then what becomes of losses
        except Exception as raised:
            error = raised
        said = {
            "training": trains,
            "micro-batches": table.micro_batches,
            "scale_grads": scale_grads,
            "schedule": self._digest,
        }
        flag = self._core is not None and self._core.divides_losses()
        divides_losses: bool | None = agree(communicator, said, error, "a step", flag=flag)
        if self._core is None or self._made_for != made_for:
            divides_losses = None  # the engine is yet to look for strategies
            self._core, self._made_for = self._make(table, scale_grads, communicator), made_for
        self._look_at_parameters(self._core)
        mode = (synchronizes, divides_losses)
        self._run(self._core, inputs, mode if trains else None)
        return inputs

    def last_step(self) -> dict[str, Any]:
        """Tells what this rank did in the last step."""
        if self._core is None:
            refuse("got no step yet, expected one", "Call step() before.")
        return self._core.last_step()

    def _meet(self) -> Communicator:
        for stage in self._stages:
            if not isinstance(stage, _PipelineStageBase):
                got = f"got a {type(stage).__name__} as stage, expected a PipelineStage"
                refuse(got, "Make one of trireme.pipelining, or of torch.", kind=TypeError)
        if self._communicator is None:
            group = AREA.expect_group(self._stages[0].group, "Pass the group of its ranks.")
            self._communicator = communicator_of(group)
            self._turn = CallTurn(self._communicator)
        return self._communicator

    def _calls_of_stages(self) -> list[TorchStageCalls]:
        if len({is_traced(stage) for stage in self._stages}) != 1:
            got = "got manual and traced stages in one schedule, expected one kind"
            refuse(got, "Build all with build_stage(), or none.")
        if len({stage.group for stage in self._stages}) != 1:
            refuse("got stages of several groups in one schedule", "Give all the same group=.")
        made = [TorchStageCalls(stage, self._loss) for stage in self._stages]
        for call in made:
            stage = call.stage
            group = dist.group.WORLD if stage.group is None else stage.group
            refuse_misplaced({"": call.submod}, call.index, stage.group_rank, group)
        return sorted(made, key=lambda call: call.index)

    def _make(
        self, table: PipelineSchedule, scale_grads: bool, communicator: Communicator
    ) -> PipelineEngine:
        self._seen = self._parameters()
        return PipelineEngine(
            table._core,
            [
                PipelineStageRequest(
                    stage=call.index,
                    name=type(call.submod).__name__,
                    forward=call.forward,
                    loss=call.loss if call.is_last and self._loss is not None else None,
                    parameters=held.parameters,
                    buffers=held.buffers,
                    strategies=held.strategies,
                    sends_gradients=sends_gradients(call.submod),
                    weights=None
                    if call.stage.dw_builder is None
                    else (call.begin_weights, call.finish_weights),
                )
                for call, held in zip(self._calls, self._held(), strict=True)
            ],
            communicator,
            scale_grads,
            self._skips(table.stages, communicator),
            [],
            scale_unlisted=False,  # torch divides gradients of stages' parameters alone
        )

    def _skips(self, stages: int, communicator: Communicator) -> list[tuple[str, int, int]]:
        """Ranks tell each other what their stages stash and pop. Collective."""
        own = {call.index: call.wiring.skips for call in self._calls}
        texts = _C.gather_texts(json.dumps(own), communicator, communicator.device)
        declared: dict[str, Any] = {str(number): ([], []) for number in range(stages)}
        for text in texts:
            declared |= json.loads(text)
        return pair_skips(declared, "stage")

    def _run(
        self, core: PipelineEngine, inputs: StepInputs, mode: tuple[bool, bool | None] | None
    ) -> None:
        for call in self._calls:
            call.begin(inputs)
        try:
            is_first = self._calls[0].index == 0
            first = [tensors_in(arg) for arg in inputs.args] if is_first else []
            with with_causes(self._calls):
                if mode is not None:
                    core.step(first, *mode)
                else:
                    core.eval_step(first, self.has_last_stage and inputs.targets is not None)
        finally:
            inputs.versions.tell_batch()
            for call in self._calls:
                call.begin(StepInputs())

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for call in self._calls for parameter in call.submod.parameters()]

    def _look_at_parameters(self, core: PipelineEngine) -> None:
        """Notices those that were put in place of others."""
        now = self._parameters()
        if not are_same(now, self._seen):
            self._seen = now
            for call, held in zip(self._calls, self._held(), strict=True):
                core.set_parameters(call.index, held.parameters, held.strategies)

    def _held(self) -> list[HeldTensors]:
        """What the engine is told of by stage, each parameter once."""
        seen: set[int] = set()
        return [held_by({"": call.submod}, seen) for call in self._calls]
