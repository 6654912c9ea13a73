"""What all schedules of torch's kind have: step() and eval(), on our engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks
from torch.distributed.pipelining.schedules import _Action

from trireme._pipeline import refuse
from trireme._pipeline.schedule import PipelineSchedule
from trireme._pipeline.torch_calls import StepInputs
from trireme._pipeline.torch_inputs import ChunkSpecs, StepArguments, cut_step
from trireme._pipeline.torch_runner import StageRunner

Loss = Callable[..., Any] | None
ArgsSpec = tuple[TensorChunkSpec, ...] | None
KwargsSpec = dict[str, TensorChunkSpec] | None
MergeSpec = dict[str, Any] | tuple[Any] | None
COMPUTES = frozenset({"F", "B", "I", "W", "OVERLAP_F_B"})


class Steps:
    """Is what all schedules have: step() and eval()."""

    scale_grads: bool
    pipeline_order: Any
    _n_microbatches: int
    _loss_fn: Loss
    _table: PipelineSchedule | None = None
    _held: list[Any]
    _backward_requires_autograd = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_step_microbatches" in cls.__dict__:
            got = f"got {cls.__name__} with a _step_microbatches() of its own, which the engine"
            refuse(f"{got} would not call", "Subclass torch's schedule.", kind=TypeError)

    def _begin(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: Loss,
        specs: tuple[ArgsSpec, KwargsSpec, MergeSpec],
        scale_grads: bool,
    ) -> None:
        if loss_fn is not None and not callable(loss_fn):
            got = f"got a {type(loss_fn).__name__} as loss_fn, expected what can be called"
            refuse(got, "Pass a function, or None.", kind=TypeError)
        self._held = stages
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._args_chunk_spec, self._kwargs_chunk_spec, self._output_merge_spec = specs
        self.scale_grads = scale_grads
        self._num_stages = stages[0].num_stages
        self._runner = StageRunner(stages, loss_fn)

    def _use(self, table: PipelineSchedule) -> None:
        self._table = table
        self.pipeline_order = {
            rank: [
                _Action.from_str(str(action))
                for action in row
                if action and action.kind in COMPUTES
            ]
            for rank, row in enumerate(table.rows)
        }

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Runs forwards and, with a ``loss_fn``, backwards of a batch. Collective.

        Args:
            args: Positional inputs, of which the first stage's rank gives a whole batch; those of
                other ranks go nowhere, as in torch.
            target: What the loss is called with beside the output: needed on the last stage's rank.
            losses: A list that gets the losses of the micro-batches there, without graph.
            return_outputs: Whether outputs are put together and returned.
            loss_kwargs: More keywords for the loss.
            arg_mbs, kwarg_mbs, target_mbs: The same, already cut: lists of tuples, dicts, targets.
            finalize_gradients: False lets strategies around stages only accumulate, until a step
                without it. It makes no other difference.
            kwargs: Go to all stages of this rank, cut as positional inputs are.

        Returns:
            The output of the last stage for the batch, without graph, on its rank; else None.

        Raises:
            ValueError, TypeError: a batch that cannot be used; ValueError on the other ranks.
            RuntimeError: what a stage or the loss raised, on all ranks, with that as ``__cause__``
                on its own; gradients are as before, and the next step works. Gradients switched
                off in a step that has backwards. ``losses`` where there are none.
        """
        trains = self._loss_fn is not None
        given = StepArguments(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(given, losses, return_outputs, loss_kwargs, trains, finalize_gradients)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the forwards of a batch, keeping no graph. Collective.

        Arguments, result and exceptions are those of :meth:`step`; without a target there are no
        losses.
        """
        given = StepArguments(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(given, losses, True, None, trains=False)

    def last_step(self) -> dict[str, Any]:
        """Tells what this rank did in the last step, as :meth:`trireme.Pipeline.last_step` does."""
        return self._runner.last_step()

    def _run(
        self,
        given: StepArguments,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        trains: bool,
        synchronizes: bool = True,
    ) -> Any:
        if self._table is None:
            refuse("got a step without a table, expected one", "Call _load_csv() before.",
                   kind=RuntimeError)  # fmt: skip
        is_last = self._runner.has_last_stage

        def deal() -> StepInputs:
            if trains and self._backward_requires_autograd and not torch.is_grad_enabled():
                got = "got a step under torch.no_grad(), expected gradients for its backwards"
                refuse(got, "Call eval().", kind=RuntimeError)
            self._expect_losses(given, losses, trains)
            specs = ChunkSpecs(self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec)
            made = StepInputs(loss_kwargs=loss_kwargs or {})
            cut_args, cut_kwargs, targets = cut_step(given, specs, made.versions)
            made.args, made.kwargs = cut_args, cut_kwargs
            made.targets = targets if is_last else None
            made.keeps_outputs = is_last and return_outputs
            return made

        inputs = self._runner.run(self._table, self.scale_grads, trains, deal, synchronizes)
        numbers = range(self._n_microbatches)
        if losses is not None and is_last:
            losses[:] = [inputs.losses[number] for number in numbers]
        if not inputs.keeps_outputs:
            return None
        return merge_chunks([inputs.outputs[number] for number in numbers], self._output_merge_spec)

    def _expect_losses(self, given: StepArguments, losses: list[Any] | None, trains: bool) -> None:
        if losses is not None and not isinstance(losses, list):
            got = f"got a {type(losses).__name__} as losses, expected a list"
            refuse(got, "Pass one to fill.", kind=TypeError)
        if given.has_target and self._loss_fn is None:
            refuse("got a target and a schedule without loss_fn", "Pass loss_fn= when making it.")
        if not self._runner.has_last_stage:
            return
        if trains and not given.has_target:
            got = "got no target on the rank of the last stage, which loss_fn takes"
            refuse(got, "Pass target=.", kind=TypeError)
        if losses is not None and not given.has_target:
            got = "got losses= in a step that computes none"
            refuse(got, "Pass loss_fn= and target=.", kind=RuntimeError)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Is torch's name for a step on micro-batches."""
        self.step(
            losses=losses,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
        )
