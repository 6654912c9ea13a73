"""Schedules of pipelines: values that can be printed, checked and costed before a run."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

from trireme import _C
from trireme._C import ElasticPlan as ElasticPlan
from trireme._C import PipelineAction as PipelineAction
from trireme._C import PipelineSchedule as _Core
from trireme._pipeline import AREA, refuse

Times = float | Sequence[float]
Checkpoint = Literal["always", "except_last", "never", "auto"]
_Costs = tuple[Sequence[float], Sequence[float], Sequence[float], float]
_COSTS = ("forward", "input", "weight", "message")


def _list_of(times: Times) -> Sequence[float]:
    return times if isinstance(times, Sequence) else (times,)


def _costs_of(forward: Times, input: Times, weight: Times, message: float) -> _Costs:
    return (_list_of(forward), _list_of(input), _list_of(weight), message)


class PipelineSchedule:
    """Which rank does what, in which order: a row of actions per rank.

    Made by :func:`pipeline_schedule` and :meth:`from_csv`, both of which check it. Times are those
    of a micro-batch in one stage: a number for all stages, or a list with one number for each, in
    any unit. B takes as long as ``input`` and ``weight``, a message from rank to rank ``message``.
    """

    def __init__(self, core: _Core) -> None:
        self._core = core

    @classmethod
    def from_csv(cls, text: str) -> "PipelineSchedule":
        """Reads a table as torch.distributed.pipelining writes it, a line per rank.

        Raises:
            ValueError: a cell that is no action (with its row and column), a table that is not
                whole, actions that wait for each other in a circle (they are listed).
        """
        AREA.expect("text", text, str, "a str", next_step="Pass what a file of that table holds.")
        return cls(_C.read_pipeline_schedule(text.encode("utf-8", "backslashreplace")))

    @property
    def ranks(self) -> int:
        """How many ranks the pipeline has."""
        return self._core.ranks

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self._core.stages

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has."""
        return self._core.micro_batches

    @property
    def stage_rank(self) -> list[int]:
        """For each stage the rank that holds it."""
        return self._core.stage_rank

    @property
    def rows(self) -> list[list[PipelineAction | None]]:
        """For each rank its actions; None is an empty cell of a table that was read."""
        return self._core.rows

    def to_csv(self, form: Literal["compute_only", "compute_comms"] = "compute_only") -> str:
        """Returns the table as torch reads it.

        ``compute_comms`` adds messages, UNSHARD, RESHARD and REDUCE_GRAD, where it has no messages
        yet.
        """
        return self._core.to_csv(form)

    def with_recomputation(self, checkpoint: Checkpoint) -> "PipelineSchedule":
        """Returns the schedule with an R, the forward once more, in front of backwards.

        Args:
            checkpoint: Of which micro-batches: "never", "except_last", "always", or "auto": those
                whose backward does not come right behind their forward.

        Raises:
            ValueError: there is an R already, or ``checkpoint`` is none of these.
        """
        AREA.expect("checkpoint", checkpoint, str, "a name", next_step="Pass 'never'.")
        return PipelineSchedule(self._core.with_recomputation(checkpoint))

    def check(self, slots: int | None = None) -> dict[tuple[int, int], int]:
        """Checks the table, and returns how many messages each edge must be able to hold.

        An edge is (stage, next stage), or back. With fewer slots than returned here some action
        would begin later than it could.

        Args:
            slots: checks, too, that no rank waits for ever where each edge has only so many.
        """
        if slots is not None and slots < 1:
            refuse(f"got {slots} slots, expected 1 or more", "Leave it out for any number.")
        return self._core.check(slots or 0)

    def bubble(
        self,
        forward: Times = 1,
        input: Times = 1,
        weight: Times = 1,
        message: float = 0,
    ) -> float:
        """Returns the share of the makespan in which a rank computes nothing, mean over ranks."""
        return self._core.bubble(_costs_of(forward, input, weight, message))

    def makespan(
        self,
        forward: Times = 1,
        input: Times = 1,
        weight: Times = 1,
        message: float = 0,
    ) -> float:
        """Returns the time from the first action to the end of the last one."""
        return self._core.makespan(_costs_of(forward, input, weight, message))

    def peak_activations(self, rank: int) -> int:
        """Returns of how many micro-batches a rank keeps all that autograd saves, at most.

        That is from F, or from R where there is one, to B or W. Each stage of the rank counts for
        itself.
        """
        return self._core.peak_activations(rank)

    def peak_messages(self, edge: tuple[int, int]) -> int:
        """Returns how many messages from one stage to another are not used up, at most."""
        return self._core.peak_messages(*edge)

    def plot(
        self,
        path: str | Path,
        *,
        forward: Times = 1,
        input: Times = 1,
        weight: Times = 1,
        message: float = 0,
    ) -> None:
        """Writes a picture of ranks over time, as ``path`` ends: .png, .svg, .pdf.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            figure = import_module("matplotlib.figure")
        except ModuleNotFoundError:
            got = "found no matplotlib, which draws the picture"
            refuse(got, "Install it, or print the schedule.", kind=ModuleNotFoundError)
        timed = self._core.timeline(_costs_of(forward, input, weight, message))
        end = max(action[3] for action in timed)
        picture = figure.Figure(figsize=(min(4 + end / 3, 40), 1 + self.ranks / 2))
        axes = picture.subplots()
        for rank, action, begin, until in timed:
            color = _COLORS[action.kind]
            axes.barh(rank, until - begin, left=begin, color=color, edgecolor="white")
            axes.text((begin + until) / 2, rank, str(action), ha="center", va="center", fontsize=6)
        axes.set_yticks(range(self.ranks), [f"rank {rank}" for rank in range(self.ranks)])
        axes.invert_yaxis()
        axes.set_xlim(0, end)
        picture.savefig(path, bbox_inches="tight")

    def __str__(self) -> str:
        """Ranks over time steps: F, I and W take one, B takes two, "." is a bubble."""
        return self._core.draw()

    def __repr__(self) -> str:
        return (
            f"PipelineSchedule(ranks={self.ranks}, stages={self.stages}, "
            f"micro_batches={self.micro_batches})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineSchedule) and self._core == other._core

    def __hash__(self) -> int:
        return hash(self._core.table())

    def __reduce__(self) -> tuple[Callable[[str], "PipelineSchedule"], tuple[str]]:
        return PipelineSchedule.from_csv, (self._core.table(),)


_COLORS = {"F": "#7aa6dc", "B": "#8fc98f", "I": "#b5dfae", "W": "#f0c27b", "R": "#c9b3de"}


def _expect_same(table: PipelineSchedule, name: str, wanted: int | None) -> None:
    found = getattr(table, name)
    if wanted is not None and wanted != found:
        what = name.replace("_", "-")
        refuse(f"got a table of {found} {what}, expected {wanted}", "Pass a table of that many.")


def _read_table(
    text: str, ranks: int | None, micro_batches: int | None, stages_per_rank: int | None
) -> PipelineSchedule:
    table = PipelineSchedule.from_csv(text)
    _expect_same(table, "ranks", ranks)
    _expect_same(table, "micro_batches", micro_batches)
    if stages_per_rank is not None:
        _expect_same(table, "stages", stages_per_rank * table.ranks)
    return table


def _read_costs(costs: Mapping[str, Times]) -> _Costs:
    unknown = sorted(set(costs) - set(_COSTS))
    if unknown:
        refuse(
            f"got costs of {', '.join(unknown)}, expected only {', '.join(_COSTS)}",
            "Correct the name.",
        )
    message = costs.get("message", 0)
    if isinstance(message, Sequence):
        got = "got a list as the cost of a message, expected one number"
        refuse(got, "Pass the mean.", kind=TypeError)
    forward, inputs, weight = (costs.get(name, 1) for name in _COSTS[:3])
    return _costs_of(forward, inputs, weight, message)


def pipeline_schedule(
    name_or_text: str,
    *,
    ranks: int | None = None,
    micro_batches: int | None = None,
    stages_per_rank: int | None = None,
    costs: Mapping[str, Times] | None = None,
    max_activations: int | None = None,
) -> PipelineSchedule:
    """Returns the schedule of that name, or reads the table that a text holds.

    Args:
        name_or_text: gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-v, dualpipe-v, zb-auto;
            or a table as :meth:`PipelineSchedule.from_csv` reads it: a text with a comma or a line
            break.
        ranks: how many there are. For a table it may be left out, as may the next two.
        micro_batches: how many a step has.
        stages_per_rank: 2 unless given for interleaved-1f1b and looped-bfs, always 2 for zb-v and
            dualpipe-v, 1 for gpipe and 1f1b, 1 unless given for zb-h1 and zb-auto.
        costs: for zb-auto: times of ``forward``, ``input``, ``weight`` (1 unless given) and of a
            ``message`` (0 unless given).
        max_activations: for zb-auto: how many forwards of a rank may wait for their backward.

    Raises:
        ValueError: an unknown name (those that there are are listed), numbers that the form cannot
            have, a table that :meth:`PipelineSchedule.from_csv` refuses.
    """
    AREA.expect("name_or_text", name_or_text, str, "a str", next_step="Pass a name or a table.")
    whole = {"expected": "a whole number or None", "next_step": "Pass a whole number."}
    for name, number in (
        ("ranks", ranks),
        ("micro_batches", micro_batches),
        ("stages_per_rank", stages_per_rank),
        ("max_activations", max_activations),
    ):
        AREA.expect(name, number, (int, type(None)), **whole)
    if "," in name_or_text or "\n" in name_or_text:
        if costs is not None or max_activations is not None:
            refuse("got costs or max_activations beside a table", "Leave them out.")
        return _read_table(name_or_text, ranks, micro_batches, stages_per_rank)
    if ranks is None or micro_batches is None:
        refuse(
            f"got '{name_or_text}' without ranks or micro_batches, expected both",
            "Pass them; only a table holds them itself.",
        )
    read = None if costs is None else _read_costs(costs)
    made = _C.make_pipeline_schedule(
        name_or_text, ranks, micro_batches, stages_per_rank, read, max_activations
    )
    return PipelineSchedule(made)


def partition(
    costs: Sequence[float],
    parts: int,
    *,
    memory: Sequence[int] | None = None,
    limit: int | None = None,
) -> list[int]:
    """Cuts layers into consecutive parts so that the most costly part costs as little as it can.

    Args:
        costs: one per layer, in any unit.
        parts: how many; each has at least one layer.
        memory: bytes per layer, with ``limit``: the bytes that a part may have.

    Returns:
        How many layers each part has. Where several cuts are as good: as even as they allow.

    Raises:
        ValueError: fewer layers than parts, costs below 0, no cut that keeps to the limit.
    """
    return _C.partition(list(costs), parts, [] if memory is None else list(memory), limit)


def elastic_plan(
    costs: Sequence[float],
    *,
    frozen: int,
    ranks: int,
    first: int | None = None,
    before: int | None = None,
    frozen_cost: float | Sequence[float] = 1 / 6,
    memory: Sequence[int] | None = None,
    limit: int | None = None,
) -> ElasticPlan:
    """Says into how few ranks a pipeline fits whose first layers are frozen.

    The ranks of a pipeline are halved while their number is even, while the most costly part of the
    best cut costs at most what that of all layers, trained, in ``first`` parts costs, and while
    bytes keep to the limit. The ranks set free run replicas of it.

    Args:
        costs: One per layer, while it is trained, in any unit.
        frozen: How many layers are frozen, from the input on.
        ranks: All that there are.
        first: Ranks of the pipeline that the run began with; all of them by default.
        before: Ranks of the present one; ``first`` by default.
        frozen_cost: What a frozen layer costs: a share of its cost, or a list of costs, one per
            layer. 1/6 is the paper's, for memory; for seconds give the measured forwards. 0 where a
            cache serves.
        memory: Bytes per layer, with ``limit``: the bytes that a rank may have.

    Returns:
        ``ranks_per_pipeline``, ``replicas``, ``balance``: the layers of each rank of a pipeline;
        ``seconds``: what the most costly of these costs.

    Raises:
        ValueError: ``first`` or ``before`` are no factor of ``ranks``; more frozen layers than
            there are; what :func:`partition` raises.
    """
    return _C.elastic_plan(
        list(costs),
        frozen=frozen,
        ranks=ranks,
        first=first,
        before=before,
        frozen_cost=frozen_cost,
        memory=memory,
        limit=limit,
    )
