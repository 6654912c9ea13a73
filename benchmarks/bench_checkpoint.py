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

saves (3 minutes): 2 ranks of DDP and of fully_shard save 200 MB of model and state, at once, beside
nothing, and beside steps; torch's fully_shard by torch.distributed.checkpoint.async_save. What a
save holds a rank for, and when it is durable.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure.bench_options import bench_parser, chosen_parts
from measure.checkpoint_runs import (
    CheckpointRun,
    Loaded,
    Model,
    Saved,
    SavesBeside,
    load_peak_mib,
    load_with,
    save_with,
    saves_beside,
)
from measure.exit_codes import exit_code
from measure.machine import cores, machine
from measure.results import write_results
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
    saved: Model


FULL = Effort(7, 5, Model(width=3072, units=16), Model(width=1024, units=16))  # 200 MB of state
QUICK = Effort(2, 1, Model(width=512, units=4), Model(width=256, units=4))


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
    parser.add_argument("--folder", help="on the disk to be measured; temporary files by default")
    arguments = parser.parse_args(command_line)
    return exit_code(lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    parts = chosen_parts("bench_checkpoint", arguments.only, PARTS)
    effort = QUICK if arguments.quick else FULL
    sides = QUICK_SIDES if arguments.quick else SIDES
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick}
    with tempfile.TemporaryDirectory(prefix="bench", dir=arguments.folder) as scratch:
        checkpoints = Checkpoints(Path(scratch), effort.model)
        checkpoints.save(sides)
        results["model"] = checkpoints.described()
        for part in parts:
            if part == "saves":
                results[part] = bench_saves(Path(scratch), effort)
            elif part == "memory":
                results[part] = bench_memory(checkpoints, sides)
            elif part == "cold" and not os.access(DROP_CACHES, os.W_OK):
                print("cold: left out, for want of the right to drop the page cache\n")
            else:
                rounds = effort.rounds if part == "warm" else effort.cold_rounds
                results[part] = bench_speed(checkpoints, sides, rounds, is_cold=part == "cold")
    if arguments.json is not None:
        write_results(arguments.json, results)
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


SAVING_SIDES = (("trireme", "ddp"), ("trireme", "fsdp"), ("torch", "torch-fsdp2"))


def bench_saves(scratch: Path, effort: Effort) -> list[dict[str, Any]]:
    """Measures and prints what a save costs; returns its part of the JSON."""
    rows: list[dict[str, Any]] = []
    for library, strategy in SAVING_SIDES:
        model, folder = effort.saved, str(scratch / f"saves-{strategy}")
        world, threads = STRATEGIES[strategy].processes(2)
        run = CheckpointRun(
            library, strategy, world, threads, folder, model.width, model.units, effort.rounds
        )
        ranks = saves_beside(run)
        rows.append({"library": library, "strategy": strategy, "ranks": list(map(asdict, ranks))})
        rows[-1]["medians"] = {name: _of_slowest(ranks, name) for name in SAVED_COLUMNS}
    cells = [
        [
            f"{row['library']}, {row['strategy']}",
            *(f"{row['medians'][name]:.4g}" for name in SAVED_COLUMNS),
        ]
        for row in rows
    ]
    print(table(["a save", *SAVED_COLUMNS.values()], cells))
    print(flush=True)
    return rows


SAVED_COLUMNS = {
    "now_s": "synchronous, s",
    "call_ms": "call, ms",
    "stall_ms": "stall, ms",
    "lost_s": "lost by steps, s",
    "durable_s": "durable alone, s",
    "durable_beside_s": "durable beside steps, s",
    "part_copy_ms": "a copy of the part, ms",
}


def _of_slowest(ranks: Sequence[SavesBeside], name: str) -> float:
    """The median over saves of what the slowest rank has measured."""
    values = [getattr(rank, name) for rank in ranks]
    if isinstance(values[0], float):
        return max(values)
    return statistics.median(map(max, zip(*values, strict=True)))


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
