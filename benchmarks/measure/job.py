"""What the runs of a comparison have in common, and how they are trained side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from workloads import WORKLOADS, Workload, WorkloadOptions

from measure.bad_input import BadInput
from measure.corpus import read_corpus
from measure.progress import Progress
from measure.ranks import Launch, RankGroup
from measure.rounds import Extent, Rounds, Trajectory
from measure.strategies import STRATEGIES
from measure.summary import Summary, summarize
from measure.worker import RankConfig


@dataclass(frozen=True)
class Job:
    """Everything that is equal for all strategies."""

    model: str
    workload: Workload
    workload_options: WorkloadOptions
    data: str
    ranks: int
    global_batch: int
    seed: int


@dataclass(frozen=True)
class JobOptions:
    """`text`: a file for the GPTs, Python's standard library if None. `tiny`: sizes for tests."""

    ranks: int = 2
    seed: int = 0
    text: str | None = None
    norm: str = "groupnorm"
    tiny: bool = False


def prepare(model: str, options: JobOptions, scratch: Path) -> Job:
    """Puts the data of `model`, one of WORKLOADS, into `scratch`. Raises BadInput if it is short or
    cannot be read."""
    corpus, data = None, "random samples"
    if model.startswith("gpt"):
        text = read_corpus(options.text)
        corpus, data = scratch / "corpus", f"{text.title} ({len(text.text) / 2**20:.1f} MiB)"
        corpus.write_bytes(text.text)
    sizes = WorkloadOptions(str(corpus) if corpus else None, options.norm, options.tiny)
    workload = WORKLOADS[model](sizes)
    batch = _global_batch(workload, options.ranks)
    return Job(model, workload, sizes, data, options.ranks, batch, options.seed)


def train(
    job: Job, names: Sequence[str], extent: Extent, scratch: Path, progress: Progress
) -> Mapping[str, Trajectory]:
    """Starts the processes of all strategies, lets them take turns and ends them."""
    with ExitStack() as stack:
        stack.callback(progress.close)
        groups = {}
        for name in names:
            world, threads = STRATEGIES[name].processes(job.ranks)
            config = RankConfig(
                strategy=name,
                workload=job.model,
                global_batch=job.global_batch,
                threads=threads,
                workload_options=job.workload_options,
                seed=job.seed,
                probe=True,
                ticks=True,
            )
            launch = Launch(name, "measure.worker", config.to_json(), world, threads, scratch)
            groups[name] = stack.enter_context(RankGroup(launch))
        for group in groups.values():
            group.replies()
        rounds = Rounds(groups, progress)
        rounds.run(extent)
        return rounds.trajectories


def summaries_of(job: Job, trajectories: Mapping[str, Trajectory]) -> list[Summary]:
    """One per strategy, in the order of `trajectories`."""
    return [
        summarize(
            name,
            trajectory,
            global_batch=job.global_batch,
            threads=STRATEGIES[name].processes(job.ranks)[1],
        )
        for name, trajectory in trajectories.items()
    ]


def _global_batch(workload: Workload, ranks: int) -> int:
    """All ranks' rows, or what the samples allow in equal parts; BadInput if a rank gets none."""
    available = len(workload.samples())
    if available < ranks:
        raise BadInput(
            "compare",
            f"got {available} {workload.unit} for {ranks} ranks, expected at least one for each",
            "Give a longer --text or fewer --ranks.",
        )
    return min(workload.rows_per_rank, available // ranks) * ranks
