"""Loading a checkpoint of another number of ranks or strategy: speed, beside a copy of its files.

    python benchmarks/bench_checkpoint.py --json benchmarks/results/checkpoint.json
    python benchmarks/bench_checkpoint.py --only warm --quick

An `mlp` of 16 units of 36 MiB with the state of its AdamW, 1.7 GiB in all, is saved by 2 and by 4
ranks of fully_shard. Fresh processes, which have built the model and an optimizer without state,
load it: 2 and 4 ranks of fully_shard, ZeRO 2, DDP, and one process with all cores. Beside each
other, in rounds of one run per side, every other round in reversed order:

  a copy       `cp -r` of the checkpoint's folder into another one on the same disk, not waiting
               until it is there
  torch's      torch.distributed.checkpoint, of the same model under torch's fully_shard over Gloo,
               from the files that it has saved: get_state_dict, load, set_state_dict

warm (10 minutes): all files are in the page cache, for every side. cold (5 minutes): none is; this
needs the right to drop the cache (root), and is left out without. Before every run what was written
earlier is on the disk.

The speed of a load is that of the checkpoint's bytes, once per host, however many ranks read them.
Its target is half of the copy's, met when the median of the paired ratios of time is 2 at most; no
verdict where there are more ranks than cores.

saves (7 minutes): 2 ranks of one thread train `gpt` and `mlp`, 170 and 200 MB of fp32 with the
state of AdamW, by DDP and fully_shard, and save at once, beside nothing, and beside steps; torch's
classes with torch.distributed.checkpoint.async_save, whose thread has a group of its own. All sides
are ready at the same time and save in turns; before each save all is on the disk that was written.
What checksums add to a save is taken to be what they add to a load of the same bytes, which the
ranks share alike.

memory (2 minutes): what the ranks of the host take while loading, at the fullest moment, beyond the
state that they have then; target: one unit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure.bench_options import (
    bench_parser,
    chosen_parts,
    earlier_results,
    let_add,
    write_added,
)
from measure.checkpoint_runs import (
    CheckpointRun,
    Loaded,
    Model,
    Saved,
    load_peak_mib,
    load_with,
    save_with,
)
from measure.exit_codes import exit_code
from measure.machine import cores, machine
from measure.save_runs import (
    SaveCost,
    SaveRun,
    cost_of_save,
    hashed_share,
    load_seconds,
    medians,
    peaks_mib,
    saving_ranks,
)
from measure.stats import PairedRatio, verdict
from measure.strategies import STRATEGIES
from measure.table import table

PARTS = ("warm", "cold", "saves", "memory")
TIME_TARGET = 2.0  # times the copy's: half its speed
UNITS_TARGET = 1.0
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
COPY = "copy"

Measure = Callable[[], Loaded]


@dataclass(frozen=True)
class Effort:
    """How much is measured. A quick run is for looking, not for judging."""

    rounds: int
    cold_rounds: int
    model: Model


FULL = Effort(7, 5, Model(width=3072, units=16))
QUICK = Effort(2, 1, Model(width=512, units=4))


@dataclass(frozen=True)
class Side:
    """Who loads what `saved_by` ranks have saved with the same library."""

    label: str
    library: str
    strategy: str
    ranks: int
    saved_by: int

    def processes(self) -> tuple[int, int]:
        return STRATEGIES[self.strategy].processes(self.ranks)


SIDES = (
    Side("fully_shard", "trireme", "fsdp", 2, 2),
    Side("fully_shard", "trireme", "fsdp", 4, 2),
    Side("fully_shard", "trireme", "fsdp", 2, 4),
    Side("ZeRO 2", "trireme", "zero2", 2, 4),
    Side("DDP", "trireme", "ddp", 2, 4),
    Side("1 process", "trireme", "single", 1, 2),
    Side("torch's fully_shard", "torch", "torch-fsdp2", 2, 2),
    Side("torch's fully_shard", "torch", "torch-fsdp2", 4, 2),
    Side("torch's fully_shard", "torch", "torch-fsdp2", 2, 4),
    Side("1 process, torch's", "torch", "single", 1, 2),
)
SAVERS = {"trireme": "fsdp", "torch": "torch-fsdp2"}
QUICK_SIDES = (*SIDES[1:3], SIDES[5], SIDES[8])


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (also if a target is missed), 2 wrong options, 3 a rank failed or
    has loaded something else than was saved."""
    parser = bench_parser(__doc__, PARTS)
    let_add(parser)
    parser.add_argument("--folder", help="on the disk to be measured; temporary files by default")
    arguments = parser.parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    parts = chosen_parts("bench_checkpoint", arguments.only, PARTS)
    earlier = earlier_results("bench_checkpoint", arguments)
    effort = QUICK if arguments.quick else FULL
    sides = QUICK_SIDES if arguments.quick else SIDES
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick}
    with tempfile.TemporaryDirectory(prefix="bench", dir=arguments.folder) as scratch:
        checkpoints = Checkpoints(Path(scratch), effort.model)
        if set(parts) != {"saves"}:
            checkpoints.save(sides)
            results["model"] = checkpoints.described()
        for part in parts:
            if part == "saves":
                results[part] = bench_saves(Path(scratch), effort.rounds)
            elif part == "memory":
                results[part] = bench_memory(checkpoints, sides)
            elif part == "cold" and not os.access(DROP_CACHES, os.W_OK):
                print("cold: left out, for want of the right to drop the page cache\n")
            else:
                rounds = effort.rounds if part == "warm" else effort.cold_rounds
                results[part] = bench_speed(checkpoints, sides, rounds, is_cold=part == "cold")
    if arguments.json is not None:
        write_added(arguments.json, results, earlier, parts)
    return 0


class Checkpoints:
    """Folders that were saved once, by library and number of ranks."""

    def __init__(self, scratch: Path, model: Model) -> None:
        self.model = model
        self._scratch = scratch
        self._saved: dict[str, Saved] = {}

    def save(self, sides: Sequence[Side]) -> None:
        """What the sides load, and what is copied."""
        needed = {(side.library, side.saved_by) for side in sides} | {("trireme", 2)}
        for library, ranks in sorted(needed, reverse=True):
            side = Side("", library, SAVERS[library], ranks, ranks)
            saved = save_with(self.run_of(side))
            self._saved[self.folder_of(side).name] = saved
            print(f"saved by {ranks} ranks of {side.strategy}: {saved.seconds:.1f} s", flush=True)
        print()

    def run_of(self, side: Side) -> CheckpointRun:
        world, threads = side.processes()
        folder = str(self.folder_of(side))
        model = self.model
        return CheckpointRun(
            side.library, side.strategy, world, threads, folder, model.width, model.units
        )

    def folder_of(self, side: Side) -> Path:
        return self._scratch / f"{side.library}-{side.saved_by}"

    def expected(self, side: Side) -> Saved:
        return self._saved[self.folder_of(side).name]

    @property
    def copied(self) -> Path:
        """The one that is copied."""
        return self.folder_of(SIDES[0])

    def copy_s(self) -> float:
        """Seconds of `cp -r`."""
        target = self._scratch / "copied"
        start = time.perf_counter()
        subprocess.run(["cp", "-r", str(self.copied), str(target)], check=True)
        seconds = time.perf_counter() - start
        shutil.rmtree(target)
        return seconds

    def mib(self) -> float:
        return sum(file.stat().st_size for file in self.copied.iterdir()) / 2**20

    def described(self) -> dict[str, float]:
        model = self.model
        return {**asdict(model), "unit_mib": model.unit_mib, "checkpoint_mib": self.mib()}


def bench_speed(
    checkpoints: Checkpoints, sides: Sequence[Side], rounds: int, *, is_cold: bool
) -> dict[str, Any]:
    """Measures and prints all sides; returns their part of the JSON."""
    print("cold: nothing in the page cache" if is_cold else "warm: all files in the page cache")
    prepare = _drop_cache if is_cold else _fill_cache
    copies: list[float] = []
    loads: list[list[Loaded]] = [[] for _ in sides]
    for number in range(rounds):
        order = [-1, *range(len(sides))]
        for index in order if number % 2 == 0 else reversed(order):
            side = sides[index]
            prepare(checkpoints.copied if index < 0 else checkpoints.folder_of(side))
            if index < 0:
                copies.append(checkpoints.copy_s())
            else:
                run, expected = checkpoints.run_of(side), checkpoints.expected(side)
                loads[index].append(load_with(run, expected))
    gb = checkpoints.mib() * 2**20 / 1e9
    rows = [_speed_row(side, runs, copies) for side, runs in zip(sides, loads, strict=True)]
    header = ["saved by, loaded by", "ranks", "s", "GB/s", "of the copy's speed", "torch's load, s"]
    print(table(header, [_speed_cells(row, gb) for row in rows]))
    print(f"{COPY}: {statistics.median(copies):.2f} s, {gb / statistics.median(copies):.2f} GB/s")
    for row in rows:
        if "ratio" in row:
            print(f"{_what(row)}, time of a load / of the copy:")
            print("\n".join("  " + line for line in PairedRatio(**row["ratio"]).lines()))
    print(flush=True)
    return {"copy_s": copies, "sides": rows}


def _speed_row(side: Side, runs: list[Loaded], copies: list[float]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    row = {**asdict(side), "runs": [asdict(run) for run in runs]}
    row["share"] = statistics.median(b / a for a, b in zip(seconds, copies, strict=True))
    if side.library == "trireme" and side.ranks <= cores():
        row["ratio"] = PairedRatio.of(seconds, copies, TIME_TARGET).to_json()
    return row


def _speed_cells(row: dict[str, Any], gb: float) -> list[str]:
    seconds = statistics.median(run["seconds"] for run in row["runs"])
    reading = statistics.median(run["reading_s"] for run in row["runs"])
    return [
        _what(row),
        str(row["ranks"]),
        f"{seconds:.2f}",
        f"{gb / seconds:.2f}",
        f"{row['share']:.0%}",
        f"{reading:.2f}" if row["library"] == "torch" else "",
    ]


def _what(row: dict[str, Any]) -> str:
    return f"{row['saved_by']} ranks, {row['label']} x {row['ranks']}"


def _fill_cache(folder: Path) -> None:
    """Whatever else has been there since."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                while opened.read(1 << 24):
                    pass


def _drop_cache(folder: Path) -> None:
    os.sync()
    DROP_CACHES.write_text("1\n")


# Rows of a rank's batch, and steps beside a save.
SAVING_WORKLOADS = {"gpt": (8, 2), "mlp": (16, 12)}
SAVING_SIDES = (
    ("trireme", "ddp", "torch-ddp"),
    ("trireme", "fsdp", "torch-fsdp2"),
    ("torch", "torch-ddp", ""),
    ("torch", "torch-fsdp2", ""),
)
SAVED_COLUMNS = {
    "now_s": "synchronous, s",
    "call_ms": "call, ms",
    "stall_ms": "stall, ms",
    "lost_s": "lost by steps, s",
    "durable_s": "durable alone, s",
    "beside_s": "durable beside steps, s",
    "copy_ms": "a copy of the part, ms",
}
HASHING_RANKS = 4
STALL_MS = 2.0
PEAK_MIB = 64.0


def bench_saves(scratch: Path, rounds: int) -> dict[str, Any]:
    """Measures and prints what a save costs; returns its part of the JSON."""
    return {workload: _bench_saves_of(workload, scratch, rounds) for workload in SAVING_WORKLOADS}


def _bench_saves_of(workload: str, scratch: Path, rounds: int) -> dict[str, Any]:
    rows, steps = SAVING_WORKLOADS[workload]
    loads: dict[str, list[list[float]]] = {}
    peaks: dict[str, list[float]] = {}
    with ExitStack() as stack:
        groups = {}
        for library, strategy, _ in SAVING_SIDES:
            folder = str(scratch / f"{workload}-{strategy}")
            run = SaveRun(library, strategy, workload, rows, steps, folder)
            groups[strategy] = stack.enter_context(saving_ranks(run, scratch))
        costs: dict[str, list[SaveCost]] = {strategy: [] for strategy in groups}
        for number in range(rounds):
            for strategy in list(groups) if number % 2 == 0 else reversed(groups):
                costs[strategy].append(cost_of_save(groups[strategy]))
        for library, strategy, _ in SAVING_SIDES:
            if library == "trireme":
                loads[strategy] = [load_seconds(groups[strategy]) for _ in range(rounds)]
            if workload == "gpt":
                peaks[strategy] = peaks_mib(groups[strategy])
    hashed = _hashed_share(workload, scratch)
    found = {
        "costs": {side: [asdict(cost) for cost in of_side] for side, of_side in costs.items()},
        "medians": {side: medians(of_side) for side, of_side in costs.items()},
        "loads_s": loads,
        "peaks_mib": peaks,
        "goals": [*_save_goals(workload, costs, loads, peaks), _hashing_goal(hashed)],
    }
    cells = [
        [f"{workload}, {side}", *(f"{row[name]:.4g}" for name in SAVED_COLUMNS)]
        for side, row in found["medians"].items()
    ]
    print(table(["a save", *SAVED_COLUMNS.values()], cells))
    for goal in found["goals"]:
        print(f"  {goal['side']}, {goal['what']}: {goal['median']:.3g}, {goal['verdict']}")
    print(flush=True)
    return found


def _hashed_share(workload: str, scratch: Path) -> float:
    rows, steps = SAVING_WORKLOADS[workload]
    folder = scratch / f"{workload}-hashed"
    run = SaveRun("trireme", "ddp", workload, rows, steps, str(folder), ranks=HASHING_RANKS)
    with saving_ranks(run, scratch) as group:
        return hashed_share(group, folder / "now")


def _hashing_goal(share: float) -> dict[str, Any]:
    what = f"bytes hashed by {HASHING_RANKS} ranks in a load / bytes of the files"
    passed = verdict(share, 1.0)
    return {"side": "ddp", "what": what, "median": share, "target": 1.0, "verdict": passed}


def _save_goals(
    workload: str,
    costs: Mapping[str, Sequence[SaveCost]],
    loads: Mapping[str, Sequence[Sequence[float]]],
    peaks: Mapping[str, Sequence[float]],
) -> list[dict[str, Any]]:
    goals: list[dict[str, Any]] = []

    def add(side: str, what: str, ratio: dict[str, Any]) -> None:
        goals.append({"side": side, "what": what, **ratio})

    def paired(
        side: str, what: str, ours: Sequence[float], theirs: Sequence[float], target: float
    ) -> None:
        add(side, what, PairedRatio.of(ours, theirs, target).to_json())

    def absolute(side: str, what: str, value: float, target: float) -> None:
        add(side, what, {"median": value, "target": target, "verdict": verdict(value, target)})

    for _, side, other in SAVING_SIDES[:2]:
        ours = {name: [getattr(cost, name) for cost in costs[side]] for name in SAVED_COLUMNS}
        torchs = {name: [getattr(cost, name) for cost in costs[other]] for name in SAVED_COLUMNS}
        paired(side, "durable alone / synchronous", ours["durable_s"], ours["now_s"], 1.15)
        if workload == "mlp":
            paired(side, "stall / a copy of the part", ours["stall_ms"], ours["copy_ms"], 1.3)
            continue
        paired(side, "stall / call of async_save", ours["stall_ms"], torchs["call_ms"], 0.05)
        absolute(side, "stall, ms", statistics.median(ours["stall_ms"]), STALL_MS)
        paired(side, "durable beside steps / async_save", ours["beside_s"], torchs["beside_s"], 0.5)
        lost = [max(0.0, seconds) for seconds in ours["lost_s"]]
        paired(side, "lost by steps / synchronous", lost, ours["now_s"], 0.5)
        with_s, without_s = map(list, zip(*loads[side], strict=True))
        paired(side, "load with checksums / without", with_s, without_s, 1.35)
        hashing = statistics.median(with_s) - statistics.median(without_s)
        bare = [seconds - hashing for seconds in ours["now_s"]]
        paired(side, "save with checksums / without", ours["now_s"], bare, 1.1)
        above = peaks[side][0] - peaks[side][1]
        absolute(side, "memory beyond training, MiB", above, PEAK_MIB)
    return goals


def bench_memory(checkpoints: Checkpoints, sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Measures and prints what loading takes; returns its part of the JSON."""
    rows = []
    for side in sides:
        _fill_cache(checkpoints.folder_of(side))
        above = load_peak_mib(checkpoints.run_of(side), checkpoints.expected(side))
        units = above / checkpoints.model.unit_mib
        row = {**asdict(side), "above_mib": above, "units": units}
        if side.library == "trireme":
            row["verdict"] = verdict(units, UNITS_TARGET)
        rows.append(row)
    cells = [
        [_what(row), f"{row['above_mib']:.1f}", f"{row['units']:.2f}", row.get("verdict", "")]
        for row in rows
    ]
    print(table(["most memory beyond the final state", "MiB", "units", "target: 1"], cells))
    print(flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
