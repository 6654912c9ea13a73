"""What a build took, by its parts: core seconds of ninja's log since a moment.

    python scripts/build_times.py <build folder> <seconds since the epoch>

A step that ran counts with the time from its start to its end, on one core. Prints nothing where
no part took a second.
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
    ("CMakeFiles/trireme_programs", "header of tests, examples and benchmarks"),
)


def part_of(output: str) -> str:
    for mark, part in PARTS:
        if output.endswith(mark) if mark.endswith(".o") else output.startswith(mark):
            return part
    return "other"


def times(log: str, since_s: float) -> dict[str, float]:
    """Seconds per part. Lines are: start and end in ms, the output's time in ns, output, hash.

    A step with several outputs has a line for each, with its start, its end and its hash.
    """
    latest: dict[str, tuple[str, str, str, float]] = {}
    for line in log.splitlines()[1:]:
        start, end, written_ns, output, step = line.split("\t")
        latest[output] = (start, end, step, float(written_ns) / 1e9)
    steps: dict[tuple[str, str, str], str] = {}
    for output, (start, end, step, written_s) in latest.items():
        if written_s >= since_s:
            steps.setdefault((start, end, step), part_of(output))
    seconds: dict[str, float] = defaultdict(float)
    for (start, end, _), part in steps.items():
        seconds[part] += (float(end) - float(start)) / 1e3
    return dict(seconds)


def main() -> None:
    folder, since = sys.argv[1:]
    log = Path(folder) / ".ninja_log"
    if not log.exists():
        return
    parts = times(log.read_text(), float(since))
    text = ", ".join(f"{part} {s:.0f}" for part, s in sorted(parts.items()) if s >= 1)
    if text:
        print(f"[build] core seconds: {text}")


if __name__ == "__main__":
    main()
