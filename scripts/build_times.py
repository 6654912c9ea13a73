"""What a build took, by its parts: core seconds of ninja's log since a moment.

    python scripts/build_times.py <build folder> <seconds since the epoch>

A step that ran counts with the time from its start to its end, on one core. Prints nothing where
nothing was built.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

PARTS = (  # the first one that fits a step's output
    (".cu.o", "CUDA kernels"),
    ("csrc/bindings", "Python module"),
    ("python/trireme/_C", "Python module"),
    ("csrc", "libtrireme"),
    ("python/trireme/lib", "libtrireme"),
    ("tests", "C++ tests"),
    ("examples", "C++ examples"),
    ("benchmarks", "C++ benchmarks"),
)


def part_of(output: str) -> str:
    for mark, part in PARTS:
        if output.endswith(mark) if mark.endswith(".o") else output.startswith(mark):
            return part
    return "other"


def times(log: str, since_s: float) -> dict[str, float]:
    """Seconds per part. Lines are: start and end in ms, the output's time in ns, output, hash."""
    latest: dict[str, tuple[float, float]] = {}
    for line in log.splitlines()[1:]:
        start, end, written_ns, output, _ = line.split("\t")
        latest[output] = (float(written_ns) / 1e9, (float(end) - float(start)) / 1e3)
    seconds: dict[str, float] = defaultdict(float)
    for output, (written_s, took_s) in latest.items():
        if written_s >= since_s:
            seconds[part_of(output)] += took_s
    return dict(seconds)


def main() -> None:
    folder, since = sys.argv[1:]
    log = Path(folder) / ".ninja_log"
    if not log.exists():
        return
    parts = times(log.read_text(), float(since))
    if sum(parts.values()) >= 1:
        text = ", ".join(f"{part} {s:.0f}" for part, s in sorted(parts.items()) if s >= 1)
        print(f"[build] core seconds: {text}")


if __name__ == "__main__":
    main()
