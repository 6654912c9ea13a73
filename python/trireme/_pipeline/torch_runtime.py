"""torch's schedule that runs any table."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from torch.distributed.pipelining import schedules as _torchs
from torch.distributed.pipelining.schedules import _Action

from trireme._pipeline import refuse
from trireme._pipeline.schedule import PipelineSchedule
from trireme._pipeline.torch_steps import COMPUTES, ArgsSpec, KwargsSpec, Loss, MergeSpec, Steps

Format = Literal["compute_only", "compute_comms"]
Lookahead = Literal["full", "auto"] | tuple[int, ...]


class _PipelineScheduleRuntime(Steps, _torchs._PipelineScheduleRuntime):
    """Runs a table: that of ``_load_csv()``, or what a subclass gives to
    ``_prepare_schedule_with_comms()``.

    Args:
        stages: Those of this rank.
        n_microbatches: How many micro-batches a step has.
        loss_fn: Called with the output of the last stage and the target of a micro-batch. Without
            one, step() has no backwards.
        args_chunk_spec, kwargs_chunk_spec: Along which dimensions inputs are cut; 0 unless given.
        output_merge_spec: Along which dimensions outputs are put together; 0 unless given.
        use_full_backward: Has no effect in torch, and none here.
        scale_grads: Whether gradients are means over micro-batches, else sums.
        backward_requires_autograd: Whether step() refuses to run under torch.no_grad().
        defer_pp_recv, max_active_stages, unshard_lookahead, defer_reduce_grad_wait,
        max_outstanding_sends: When torch's runtime receives, gathers and waits. Here a message is
            sent as soon as it exists and received when it is needed, whatever these say; they are
            only checked.

    Raises:
        ValueError: numbers that the schedule cannot have.
    """

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: MergeSpec = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Lookahead = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
    ) -> None:
        if not isinstance(stages, list | tuple) or not stages:
            got = f"got a {type(stages).__name__} as stages, expected a list of one or more"
            refuse(got, "Pass all stages of this rank.", kind=TypeError)
        if use_full_backward is not None:
            warnings.warn("use_full_backward= has no effect: leave it out", stacklevel=2)
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self._begin(list(stages), n_microbatches, loss_fn, specs, scale_grads)
        self._backward_requires_autograd = backward_requires_autograd
        self._stages = self._held
        self.pp_group_size = stages[0].group_size
        self.rank = stages[0].group_rank
        self.n_local_stages = len(stages)
        self.pipeline_order = {}
        _expect_lowering(
            self.pp_group_size,
            (defer_pp_recv, defer_reduce_grad_wait),
            max_active_stages,
            unshard_lookahead,
            max_outstanding_sends,
        )

    @property
    def pipeline_order_with_comms(  # type: ignore[override]
        self,
    ) -> dict[int, list[_Action]]:
        """The table with messages between its actions."""
        if self._table is None:
            raise AttributeError("pipeline_order_with_comms")
        rows = PipelineSchedule.from_csv(self._table.to_csv("compute_comms")).rows
        return {rank: [_Action.from_str(str(action)) for action in row if action] for rank, row in
                enumerate(rows)}  # fmt: skip

    def register_custom_function(self, computation_type: Any, custom_function: Any) -> None:
        """Refuses: actions are run in C++."""
        got = f"got a function of your own for {computation_type}, which the engine does not call"
        refuse(got, "Use torch's schedule for that.", kind=NotImplementedError)

    def _prepare_schedule_with_comms(
        self, actions: dict[int, list[Any]], format: Format = "compute_only"
    ) -> None:
        """Takes a table as lists of torch's actions by rank."""
        rows = (actions[rank] for rank in sorted(actions))
        lines = (",".join("" if action is None else str(action) for action in row) for row in rows)
        self._take("\n".join(lines), format)

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Reads the table from a file, a line per rank.

        Raises:
            ValueError: a table that is wrong, or has other numbers than the schedule; messages in
                one that is to have none.
            NotImplementedError: an unknown format.
        """
        with open(filename, newline="") as file:
            self._take(file.read(), format)

    def _dump_csv(self, filename: str, format: Format = "compute_comms") -> None:
        """Writes the table to a file, as ``_load_csv()`` and torch read it."""
        if self._table is None:
            refuse("got no table to write, expected one", "Call _load_csv() before.",
                   kind=RuntimeError)  # fmt: skip
        _expect_format(format)
        with open(filename, "w", newline="") as file:
            file.write(self._table.to_csv(format))

    def _take(self, text: str, format: str) -> None:
        _expect_format(format)
        table = PipelineSchedule.from_csv(text)
        for name, found, expected in (
            ("ranks", table.ranks, self.pp_group_size),
            ("stages", table.stages, self._num_stages),
            ("micro-batches", table.micro_batches, self._n_microbatches),
        ):
            if found != expected:
                got = f"got a table of {found} {name}, expected {expected}"
                refuse(got, "Pass a table of that many.")
        if format == "compute_only":
            for rank, row in enumerate(table.rows):
                for place, action in enumerate(row):
                    if action is not None and action.kind not in COMPUTES:
                        got = f"got {action} as action {place} of rank {rank}, expected F, B, I, W"
                        refuse(got, "Pass format='compute_comms'.")
        self._use(table)

    def _use(self, table: PipelineSchedule) -> None:
        super()._use(table)
        self.stage_index_to_group_rank = dict(enumerate(table.stage_rank))
        for stage in self._held:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank


def _expect_format(format: str) -> None:
    if format not in ("compute_only", "compute_comms"):
        got = f"got format={format!r}, expected 'compute_only' or 'compute_comms'"
        refuse(got, "Pass one of them.", kind=NotImplementedError)


def _expect_lowering(
    ranks: int,
    flags: tuple[object, object],
    max_active_stages: object,
    unshard_lookahead: object,
    max_outstanding_sends: object,
) -> None:
    def whole(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    ahead = unshard_lookahead in ("full", "auto") or (
        isinstance(unshard_lookahead, tuple)
        and len(unshard_lookahead) == ranks
        and all(whole(number, 1) for number in unshard_lookahead)
    )
    for name, value, fits in (
        ("defer_pp_recv", flags[0], isinstance(flags[0], bool)),
        ("defer_reduce_grad_wait", flags[1], isinstance(flags[1], bool)),
        ("max_active_stages", max_active_stages, whole(max_active_stages, 1)),
        ("unshard_lookahead", unshard_lookahead, ahead),
        (
            "max_outstanding_sends",
            max_outstanding_sends,
            max_outstanding_sends is None or whole(max_outstanding_sends, 0),
        ),
    ):
        if not fits:
            got = f"got {name}={value!r}, which torch does not take either"
            refuse(got, "See torch's documentation of it, or leave it out.")
