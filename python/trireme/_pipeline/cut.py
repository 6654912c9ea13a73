"""Which schedule a pipeline has, and which layers its stages have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trireme._C import Communicator
from trireme._pipeline import refuse
from trireme._pipeline.deferred_batch_norm import refuse_batch_norms
from trireme._pipeline.schedule import PipelineSchedule, Times, pipeline_schedule
from trireme._pipeline.stages import Balance, Stage, deal_out, layers_of, names_in_whole
from trireme._pipeline.traced import own_name, show_under_own_names, traced_layers


@dataclass
class Cut:
    """How a module is cut into layers, and these into stages."""

    module: nn.Module
    split: Sequence[str] | None
    balance: Balance
    sample: Any
    defers_batch_norm: bool

    def layers(self) -> dict[str, nn.Module]:
        """Returns the layers by name."""
        if self.split is None:
            layers = layers_of(self.module)
            if self.defers_batch_norm:
                refuse_batch_norms(self.module)
            return layers
        if self.balance is not None:
            refuse("got balance= beside split=, which says where stages begin", "Leave one out.")
        if self.defers_batch_norm:
            got = "got deferred_batch_norm=True for a module that is traced"
            refuse(got, "Convert it by convert_deferred_batch_norm(), or give a Sequential.",
                   kind=NotImplementedError)  # fmt: skip
        return traced_layers(self.module, self.split, self.sample)

    def balance_of(self, layers: Mapping[str, nn.Module]) -> Balance:
        """Returns how many layers stages have, as far as the caller says."""
        return self.balance if self.split is None else [1] * len(layers)

    def deal_out(self, stages: int, communicator: Communicator) -> list[int]:
        """Returns how many layers each stage has. Collective where layers are measured."""
        if self.split is not None:
            return [1] * stages
        assert isinstance(self.module, nn.Sequential)
        return deal_out(self.module, stages, self.balance, self.sample, communicator)

    def show(self, layers: Mapping[str, nn.Module], pipe: nn.Module) -> None:
        """Lets the pipeline have layers of this rank under the module's names."""
        if self.split is None:
            pipe._modules.update(layers)
        else:
            show_under_own_names(pipe, layers.values(), self.module)

    def names_in_whole(self, modules: Mapping[str, nn.Module]) -> dict[str, str]:
        """Returns what hangs in several places by its later names, with the first one."""
        found = names_in_whole(modules)
        if self.split is None:
            return found
        return {own_name(later): own_name(first) for later, first in found.items()}


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
