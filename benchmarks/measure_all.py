"""Measures what the pages show, at one commit, one script after the other.

    python benchmarks/measure_all.py
    python benchmarks/measure_all.py --only memory,faults

bench_rounds.py, bench_horovod.py, bench_integrations.py, bench_gpu.py and bench_builds.py are run
by themselves. It takes three to five hours on 2 cores, which should have nothing else to do, a
build of everything (activation, ps, remote and compression run C++ programs), and root (hosts and
compression put two hosts on this machine). Each script writes its JSON into benchmarks/results;
then benchmarks/readme_results.py writes the pages. Code with changes that are not committed is
refused, since nobody could say later what was measured. Results name the last commit that changed
code, so they may be committed between scripts (`--only`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measure.bad_input import BadInput, unknown_name
from measure.exit_codes import exit_code
from measure.machine import commit, warn_if_busy

BENCHMARKS = Path(__file__).resolve().parent
NAMES = (
    "steps",
    "memory",
    "overheads",
    "collectives",
    "faults",
    "hosts",
    "optimizers",
    "checkpoint",
    "activation",
    "pipeline",
    "ps",
    "remote",
    "compression",
    "pipetransformer",
)


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a script failed, 2 for wrong options or changes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(NAMES), help=f"out of {', '.join(NAMES)}")
    arguments = parser.parse_args(command_line)
    return exit_code(lambda: _measure(arguments.only.split(",")))


def _measure(names: Sequence[str]) -> int:
    for name in names:
        if name not in NAMES:
            raise unknown_name("measure_all", "script", name, NAMES)
    if (found := commit()).endswith("+"):
        raise BadInput(
            "measure_all", f"got changes of the code since {found[:-1]}", "Commit them first."
        )
    failed = []
    for name in names:
        warn_if_busy()
        began = time.monotonic()
        script, results = BENCHMARKS / f"bench_{name}.py", BENCHMARKS / "results" / f"{name}.json"
        code = subprocess.run([sys.executable, script, "--json", results], check=False).returncode
        print(f"[measure_all] {name}: {time.monotonic() - began:.0f} s, exit code {code}\n")
        failed += [name] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
