"""What training holds on a host, all ranks together, beside what the library says beforehand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from measure.fresh_run import fresh_ranks
from measure.memory import without_files_mib
from measure.rounds import WARM_UP_STEPS
from measure.sides import Side

KINDS = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class HostMemory:
    """MiB of all ranks, what they share counted once.

    Of PSS what the ranks held before their model was built (interpreter, torch, samples, process
    group) is taken off. `between_steps`: freed memory given back, so without activations.
    `after_backward`: with gradients and what the allocator keeps of activations. The kinds are of
    tensors after a backward, as far as their pages are there.
    """

    between_steps: float
    after_backward: float
    parameters: float
    gradients: float
    optimizer_state: float

    @property
    def model_states(self) -> float:
        return self.parameters + self.gradients + self.optimizer_state

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model_states": self.model_states}


def measure_host_memory(side: Side, workload: str, ranks: int) -> HostMemory:
    """After five steps of fresh processes."""
    with fresh_ranks(side, workload, ranks) as group:
        group.ask({"do": "steps", "count": WARM_UP_STEPS})
        resting = [reply["memory"] for reply in group.ask({"do": "rest"})]
        holding = [reply["memory"] for reply in group.ask({"do": "measure"})]
    kinds = {kind: sum(rank[kind] for rank in holding) for kind in KINDS}
    return HostMemory(_since_start(resting), _since_start(holding), **kinds)


def _since_start(ranks: list[dict[str, float]]) -> float:
    return sum(without_files_mib(rank) - rank["at_start"] for rank in ranks)
