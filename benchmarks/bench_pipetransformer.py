"""What freezing layers and caching what is frozen wins, and what it costs.

    python benchmarks/bench_pipetransformer.py --json benchmarks/results/pipetransformer.json
    python benchmarks/bench_pipetransformer.py --only reads --quick

epochs (30 minutes): `gpt` on 2 ranks x 1 thread, 6 epochs of 16 steps, alpha 1/3 by the schedule:
plain DDP, DDP + Freeze, DDP + Freeze + cache; a fixed pipeline, + Freeze, + plan and transform, all
of it; the last epoch and the whole run.

transform (1 minute): the same model from a pipeline of both ranks to a replica on each, beside one
copy of the bytes that come to a rank.

alphas (4 minutes): the loss of text that is never trained on, behind each of these epochs, without
freezing and at alpha 1/5, 1/3 and 1/2.

off (1 minute): steps of `mlp` under DDP with a Freeze that freezes nothing, beside plain ones.

change (1 minute): the slower one of the first two steps behind a change beside a usual one, under
DDP, ZeRO 2 and fully_shard.

reads (2 minutes): batches of 4 and of 32 rows out of the cache beside a copy of the same rows, and
the memory of the cache on the host beside the bytes of its entries.

Sides run in fresh processes, odd rounds reversed. A target is met when the median of the paired
ratios is at or below it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from measure.bench_options import run_in_parts
from measure.elastic_runs import SIDES as ELASTIC_SIDES
from measure.elastic_runs import measure_elastic
from measure.freeze_runs import ALPHA, EPOCHS, ROW_FLOATS, SIDES, STEPS, STRATEGIES, measure_freeze
from measure.stats import PairedRatio
from measure.table import table

LAST_EPOCH_TARGET = 0.45
WHOLE_RUN_TARGET = 0.88
ELASTIC_TARGET = 0.55
TRANSFORM_TARGET, TRANSFORM_MS = 2.0, 50.0  # of a copy, and what comes on top
OFF_TARGET = 1.01
CHANGE_TARGET = 1.2
READ_TARGET = 2.0
MEMORY_TARGET = 1.05
ALPHAS = (1 / 5, 1 / 3, 1 / 2)


@dataclass(frozen=True)
class Effort:
    """How much is measured. A quick run is for looking, not for judging."""

    rounds: int
    epochs: int
    steps: int
    blocks: int
    samples: int
    reads: int
    tiny: bool


FULL = Effort(rounds=3, epochs=EPOCHS, steps=STEPS, blocks=9, samples=64, reads=41, tiny=False)
QUICK = Effort(rounds=1, epochs=4, steps=2, blocks=2, samples=32, reads=3, tiny=True)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed."""
    return run_in_parts("bench_pipetransformer", __doc__, list(PARTS), _bench, command_line)


def _bench(part: str, quick: bool, results: dict[str, Any]) -> bool:
    print(f"{part}:", flush=True)
    results[part] = PARTS[part](QUICK if quick else FULL)
    return True


def _epochs(effort: Effort, side: str, alpha: float = ALPHA) -> dict[str, Any]:
    """One run, whose seconds are those of the slower rank."""
    given = {"epochs": effort.epochs, "steps": effort.steps, "tiny": effort.tiny}
    measure = measure_elastic if side in ELASTIC_SIDES else measure_freeze
    ranks = measure("epochs", side=side, alpha=alpha, **given)
    seconds = [max(pair) for pair in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    losses = [statistics.mean(p) for p in zip(*(rank["loss"] for rank in ranks), strict=True)]
    hits = [sum(pair) for pair in zip(*(rank["hits"] for rank in ranks), strict=True)]
    told = {"hits": hits, "frozen": ranks[0]["frozen"], "ranks": ranks[0].get("ranks", [])}
    held_out = ranks[0].get("held_out", [])
    return {"seconds": seconds, "loss": losses, "held_out": held_out, **told}


def bench_epochs(effort: Effort) -> dict[str, Any]:
    """Measures and prints epochs of each side; returns its part of the JSON."""
    sides = (*SIDES, *ELASTIC_SIDES)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(effort.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            runs[side].append(_epochs(effort, side))
    rows = [
        {
            "label": side,
            "last_s": statistics.median(run["seconds"][-1] for run in its),
            "whole_s": statistics.median(sum(run["seconds"]) for run in its),
            "loss": its[0]["loss"][-1],
            "frozen": its[0]["frozen"],
            "hits": its[0]["hits"],
            "ranks": its[0]["ranks"],
        }
        for side, its in runs.items()
    ]
    print(
        table(
            ["gpt", "last epoch, s", "whole run, s", "last loss"],
            [
                [r["label"], f"{r['last_s']:.2f}", f"{r['whole_s']:.2f}", f"{r['loss']:.4f}"]
                for r in rows
            ],
        )
    )
    with_cache, without = runs["ddp+freeze+cache"], runs["ddp+freeze"]
    last = PairedRatio.of(
        [run["seconds"][-1] for run in with_cache],
        [run["seconds"][-1] for run in without],
        LAST_EPOCH_TARGET,
    )
    whole = PairedRatio.of(
        [sum(run["seconds"]) for run in with_cache],
        [sum(run["seconds"]) for run in without],
        WHOLE_RUN_TARGET,
    )
    _print("last epoch, with cache / without", last)
    _print("whole run, with cache / without", whole)
    elastic = PairedRatio.of(
        [sum(run["seconds"]) for run in runs["all"]],
        [sum(run["seconds"]) for run in runs["pipeline"]],
        ELASTIC_TARGET,
    )
    _print("whole run, all / fixed pipeline", elastic)
    ratios = {"last": asdict(last), "whole": asdict(whole), "elastic": asdict(elastic)}
    return {"rows": rows, **ratios}


def bench_transform(effort: Effort) -> dict[str, Any]:
    """Measures and prints changes of plan; returns its part of the JSON."""
    found = [
        measure_elastic("transform", blocks=max(2, effort.blocks), tiny=effort.tiny)
        for _ in range(effort.rounds)
    ]
    slower = [max(ranks, key=lambda rank: rank["transform_ms"]) for ranks in found]
    ratio = PairedRatio.of(
        [max(0.0, rank["transform_ms"] - TRANSFORM_MS) for rank in slower],
        [rank["copy_ms"] for rank in slower],
        TRANSFORM_TARGET,
    )
    _print(f"transform less {TRANSFORM_MS:.0f} ms / copy of what comes", ratio)
    medians = {
        name: statistics.median(rank[name] for rank in slower)
        for name in ("transform_ms", "copy_ms")
    }
    return {"mib": slower[0]["bytes"] / 2**20, **medians, "ratio": asdict(ratio)}


def bench_alphas(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints losses of held-out text by alpha; returns its part of the JSON."""
    rows = [{"alpha": "none", "loss": _epochs(effort, "ddp")["held_out"]}]
    rows += [
        {"alpha": f"{alpha:.2f}", "loss": _epochs(effort, "ddp+freeze", alpha)["held_out"]}
        for alpha in ALPHAS
    ]
    for row in rows:
        print(f"alpha {row['alpha']}: " + " ".join(f"{loss:.4f}" for loss in row["loss"]))
    return rows


def bench_off(effort: Effort) -> dict[str, Any]:
    """Measures and prints steps with a Freeze that freezes nothing; returns its part of the
    JSON."""
    ranks = measure_freeze("off", blocks=effort.blocks, tiny=effort.tiny)
    ratio = PairedRatio.of(ranks[0]["freeze"], ranks[0]["plain"], OFF_TARGET)
    _print("step with Freeze / plain step", ratio)
    medians = {f"{name}_ms": statistics.median(taken) for name, taken in ranks[0].items()}
    return {**medians, "ratio": asdict(ratio)}


def bench_change(effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints first steps behind a change; returns its part of the JSON."""
    rows = []
    for strategy in STRATEGIES:
        ranks = measure_freeze(
            "change", strategy=strategy, changes=max(2, effort.blocks), tiny=effort.tiny
        )
        ratio = PairedRatio.of(ranks[0]["first"], ranks[0]["usual"], CHANGE_TARGET)
        _print(f"{strategy}, first step behind a change / usual step", ratio)
        medians = {f"{name}_ms": statistics.median(taken) for name, taken in ranks[0].items()}
        rows.append({"strategy": strategy, **medians, "ratio": asdict(ratio)})
    return rows


def bench_reads(effort: Effort) -> dict[str, Any]:
    """Measures and prints reads of the cache, and its memory; returns its part of the JSON."""
    sizes = ROW_FLOATS[:1] if effort.tiny else ROW_FLOATS
    found = [
        measure_freeze("reads", samples=effort.samples, rounds=effort.reads, row_floats=sizes)
        for _ in range(effort.rounds)
    ]
    rows: list[dict[str, Any]] = []
    memories: list[dict[str, Any]] = []
    for number in range(len(sizes)):
        runs = [[rank["sizes"][number] for rank in ranks] for ranks in found]
        kib = runs[0][0]["bytes"] // 1024
        for place, batch in enumerate(runs[0][0]["batches"]):
            firsts = [run[0]["batches"][place] for run in runs]
            ratio = PairedRatio.of(
                [it["read_us"] for it in firsts], [it["copy_us"] for it in firsts], READ_TARGET
            )
            _print(f"{batch['rows']} rows of {kib} KiB, read / copy", ratio)
            medians = {
                name: statistics.median(it[name] for it in firsts)
                for name in ("read_us", "copy_us")
            }
            rows.append({"kib": kib, "rows": batch["rows"], **medians, "ratio": asdict(ratio)})
        memory = PairedRatio.of(
            [sum(rank["pss"] for rank in run) for run in runs],
            [run[0]["entries"] for run in runs],
            MEMORY_TARGET,
        )
        _print(f"{kib} KiB, shared memory of all ranks / bytes of entries", memory)
        memories.append({"kib": kib, "ratio": asdict(memory)})
    return {"rows": rows, "memory": memories}


def _print(what: str, ratio: PairedRatio) -> None:
    low, high = ratio.quartiles
    print(
        f"{what}: {ratio.median:.3f} (quartiles {low:.3f} to {high:.3f}), "
        f"target {ratio.target}: {ratio.verdict}",
        flush=True,
    )


PARTS: dict[str, Callable[[Effort], Any]] = {
    "epochs": bench_epochs,
    "transform": bench_transform,
    "alphas": bench_alphas,
    "off": bench_off,
    "change": bench_change,
    "reads": bench_reads,
}

if __name__ == "__main__":
    sys.exit(main())
