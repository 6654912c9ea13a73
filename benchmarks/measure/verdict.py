"""What a comparison came to, in a sentence: what was fastest, by how much, at which memory."""

from __future__ import annotations

from collections.abc import Sequence

from measure.stats import NOISE
from measure.strategies import STRATEGIES
from measure.summary import Summary

NAMES = {
    "dp": "Trireme's DataParallel",
    "ddp": "Trireme's DDP",
    "zero1": "Trireme's ZeRO 1",
    "zero2": "Trireme's ZeRO 2",
    "fsdp": "Trireme's fully_shard",
    "torch-ddp": "torch's DDP",
    "torch-zero1": "torch's ZeRO 1",
    "torch-fsdp2": "torch's FSDP2",
}
ALONE = "single"


def sentence(job: str, summaries: Sequence[Summary]) -> str:
    """Names the fastest run that trains in parallel, the other library's beside it, and one process
    if it was there, which may well be the fastest of all."""
    parallel = [s for s in summaries if s.strategy != ALONE]
    best = min(parallel, key=_ms)
    rivals = [s for s in parallel if _is_ours(s) != _is_ours(best)]
    if rivals and not _is_ours(best):
        rivals = [min(rivals, key=_ms)]
    alone = next((s for s in summaries if s.strategy == ALONE), None)
    level = [
        _name(s)
        for s in parallel
        if s is not best and s not in rivals and _ms(s) <= _ms(best) * (1 + NOISE)
    ]
    beside = " and ".join(
        f"{_ms(best) / _ms(r):.2f} of the time of {_with_numbers(r)}" for r in rivals
    )
    text = f"{_name(best)}{_level(level)}: {_numbers(best)}"
    text += f", {beside}" if beside else ""
    if alone is None:
        return f"On {job} the fastest is {text}."
    if _ms(alone) < _ms(best) * (1 - NOISE):
        return (
            f"On {job} {_name(alone)} is fastest, {_numbers(alone)}; of the parallel runs the "
            f"fastest is {text}."
        )
    place = "is as fast" if _ms(alone) <= _ms(best) * (1 + NOISE) else "is slower"
    return f"On {job} the fastest is {text}; {_name(alone)} {place}, {_numbers(alone)}."


def training_mib(summary: Summary) -> float:
    """What training takes of the host's memory after a backward, all ranks together, beyond what
    interpreters, libraries and samples took before it began."""
    return sum(mib for kind, mib in summary.memory_mib.items() if kind != "at_start")


def _name(summary: Summary) -> str:
    if summary.strategy == ALONE:
        threads = f"{summary.threads} thread" + ("s" if summary.threads > 1 else "")
        return f"one process with {threads}"
    return NAMES.get(summary.strategy, summary.strategy)


def _numbers(summary: Summary) -> str:
    return f"{_ms(summary):.0f} ms a step with {training_mib(summary):.0f} MiB"


def _with_numbers(summary: Summary) -> str:
    return f"{_name(summary)} ({_ms(summary):.0f} ms, {training_mib(summary):.0f} MiB)"


def _level(names: Sequence[str]) -> str:
    return f" (level with {' and '.join(names)})" if names else ""


def _ms(summary: Summary) -> float:
    return summary.step_ms["median"]


def _is_ours(summary: Summary) -> bool:
    return STRATEGIES[summary.strategy].needs_trireme
