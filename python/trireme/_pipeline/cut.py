"""Which schedule a pipeline has, and which layers its stages have."""

from __future__ import annotations

from collections.abc import Mapping

from trireme._pipeline import refuse
from trireme._pipeline.schedule import PipelineSchedule, Times, pipeline_schedule
from trireme._pipeline.stages import Balance, Stage


def schedule_of(
    given: str | PipelineSchedule,
    chunks: int,
    ranks: int,
    balance: Balance,
    costs: Mapping[str, Times] | None,
    layers: int,
) -> PipelineSchedule:
    if isinstance(given, PipelineSchedule):
        if costs is not None:
            refuse("got costs= beside a schedule that is made", "Leave them out.")
        made = given
        if (made.ranks, made.micro_batches) != (ranks, chunks):
            got = (
                f"got a schedule of {made.ranks} ranks and {made.micro_batches} micro-batches, "
                f"expected {ranks} ranks and chunks={chunks}"
            )
            refuse(got, "Make it for these.")
    else:
        per_rank = None
        is_table = isinstance(given, str) and ("," in given or "\n" in given)
        if balance is not None and not isinstance(balance, str) and not is_table:
            per_rank, over = divmod(len(balance), ranks)
            if over or per_rank == 0:
                got = f"got a balance for {len(balance)} stages and {ranks} ranks"
                why = "more ranks than stages" if per_rank == 0 else "stages that do not divide"
                refuse(f"{got}: {why}", "Give each rank as many stages.")
        made = pipeline_schedule(
            given, ranks=ranks, micro_batches=chunks, stages_per_rank=per_rank, costs=costs
        )
    idle = sorted(set(range(ranks)) - set(made.stage_rank))
    if idle:
        got = f"got a schedule with no stage for rank {idle[0]}, expected one or more for each"
        refuse(got, "Use fewer ranks, or another table.")
    if layers < made.stages:
        got = f"got {layers} layers for {made.stages} stages of {ranks} ranks, expected one each"
        refuse(got, "Use fewer ranks, or fewer stages per rank.")
    return made


def stages_of(layers: list[str], counts: list[int], stage_rank: list[int]) -> list[Stage]:
    stages, begin = [], 0
    for number, (count, rank) in enumerate(zip(counts, stage_rank, strict=True)):
        stages.append(Stage(number, rank, tuple(layers[begin : begin + count])))
        begin += count
    return stages
