"""What one run came to: the numbers of the table, the plots and the JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from measure.memory import host_pss_mib
from measure.rounds import Trajectory
from measure.stats import spread

PHASES = ("forward", "backward", "exposed_comm", "optimizer")
KINDS = ("at_start", "parameters", "gradients", "optimizer_state", "rest")


@dataclass(frozen=True)
class Summary:
    """One run. Times in ms over the steps after warm-up, mean over ranks; memory in MiB.

    `phase_ms` and `memory_mib` are the stacks of the plots, keyed by PHASES and KINDS; "backward"
    there is without its exposed communication. `memory_mib` is of all ranks after a backward, with
    what they share counted once, and adds up to `pss_mib_host`: "at_start" is interpreters with
    libraries, samples and the process group, "rest" is gradient buckets and what the allocator
    keeps of the activations.
    """

    strategy: str
    world: int
    threads: int
    step_ms: dict[str, float]
    samples_per_s: float
    phase_ms: dict[str, float]
    exposed_comm_ms: float
    reported_exposed_comm_ms: float
    faults_per_step: float
    memory_mib: dict[str, float]
    peak_rss_mib_per_rank: float
    pss_mib_host: float
    losses: list[float]
    seconds: list[float]

    @property
    def final_loss(self) -> float:
        return self.losses[-1]

    def to_json(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """An entry of `runs` in the result file."""
        return {
            "strategy": self.strategy,
            "world": self.world,
            "threads_per_rank": self.threads,
            "options": dict(options),
            "step_ms": self.step_ms,
            "samples_per_s": self.samples_per_s,
            "phase_ms": self.phase_ms,
            "exposed_comm_ms": self.exposed_comm_ms,
            "reported_exposed_comm_ms": self.reported_exposed_comm_ms,
            "page_faults_per_step": self.faults_per_step,
            "peak_rss_mib_per_rank": self.peak_rss_mib_per_rank,
            "pss_mib_host": self.pss_mib_host,
            "memory_mib": self.memory_mib,
            "final_loss": self.final_loss,
            "losses": self.losses,
            "seconds": self.seconds,
        }


def summarize(strategy: str, trajectory: Trajectory, *, global_batch: int, threads: int) -> Summary:
    """The numbers of a finished trajectory."""
    step_ms = spread(trajectory.mean("step_ms"))
    exposed = statistics.median(trajectory.mean("exposed_ms"))
    backward = statistics.median(trajectory.mean("backward_ms"))
    forward = statistics.median(trajectory.mean("forward_ms"))
    optimizer = statistics.median(trajectory.mean("optimizer_ms"))
    # Medians of parts do not add up to the median of the whole, so they are scaled to.
    scale = step_ms["median"] / (forward + backward + optimizer)
    parts = (forward, backward - exposed, exposed, optimizer)
    return Summary(
        strategy=strategy,
        world=len(trajectory.ranks),
        threads=threads,
        step_ms=step_ms,
        samples_per_s=global_batch / step_ms["median"] * 1e3,
        phase_ms={name: scale * part for name, part in zip(PHASES, parts, strict=True)},
        exposed_comm_ms=exposed,
        reported_exposed_comm_ms=statistics.median(trajectory.mean("reported_exposed_ms")),
        faults_per_step=statistics.median(trajectory.mean("faults")),
        memory_mib=_memory_stack(trajectory.memory),
        peak_rss_mib_per_rank=max(held["peak_rss"] for held in trajectory.memory),
        pss_mib_host=host_pss_mib(trajectory.memory),
        losses=trajectory.losses(),
        seconds=_seconds(trajectory.mean("step_ms", first=0)),
    )


def _memory_stack(ranks: list[dict[str, float]]) -> dict[str, float]:
    stack = {kind: sum(rank[kind] for rank in ranks) for kind in KINDS[:-1]}
    stack["at_start"] += max(rank["rss_file"] for rank in ranks)
    rest = max(0.0, host_pss_mib(ranks) - sum(stack.values()))
    return {**stack, "rest": rest}


def _seconds(step_ms: list[float]) -> list[float]:
    """Training time at the end of each step, other runs' turns not counted."""
    clock, total = [], 0.0
    for step in step_ms:
        total += step / 1e3
        clock.append(total)
    return clock


def reference_of(names: list[str]) -> str:
    """The run that others are measured against: torch's DDP if it is there, else the first one."""
    return "torch-ddp" if "torch-ddp" in names else names[0]
