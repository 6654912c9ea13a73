"""A run of one side on two hosts that are namespaces of this machine (examples/two_hosts.sh)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.bad_input import BadInput
from measure.fresh_run import rank_config
from measure.ranks import LAST_WORDS_LINES, RankFailed
from measure.sides import Side

ROOT = Path(__file__).resolve().parents[2]
HOSTS = 2
NO_NAMESPACES = 3  # exit code of examples/two_hosts.sh


@dataclass(frozen=True)
class HostsRun:
    """Medians of one run: of the slower host, and what each of them sent in a step."""

    step_ms: float
    sent_mb: list[float]


def run_launched(
    area: str,
    label: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    files: int,
    limit_s: float,
) -> list[dict[str, Any]]:
    """Runs `command` with a folder behind it; returns the JSON of the `files` that it writes there.

    Raises RankFailed, and BadInput where examples/two_hosts.sh can make no namespaces.
    """
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        finished = subprocess.run(
            [*command, scratch],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=environment,
        )
        found = [json.loads(file.read_text()) for file in sorted(Path(scratch).iterdir())]
    if finished.returncode == NO_NAMESPACES:
        raise BadInput(area, finished.stderr.strip(), "Run it as root, with iproute2.")
    if finished.returncode != 0 or len(found) != files:
        words = "\n".join(finished.stderr.splitlines()[-LAST_WORDS_LINES:])
        raise RankFailed(f"[{area}] {label}: a rank failed. It printed last:\n{words}")
    return found


@dataclass(frozen=True)
class TwoHosts:
    """What both hosts run, and the cable between them."""

    area: str
    workload: str
    ranks_per_host: int
    rate: str = ""
    """Of the cable, as tc writes it; as fast as memory if empty."""
    limit_s: float = 300

    def run(self, side: Side, steps: int) -> HostsRun:
        """One run in fresh processes. Raises RankFailed, and BadInput where there are no
        namespaces."""
        config = rank_config(side, self.workload, HOSTS * self.ranks_per_host)
        benchmarks = ROOT / "benchmarks"
        worker = benchmarks / "measure" / "hosts_worker.py"
        command = ["bash", str(ROOT / "examples" / "two_hosts.sh"), str(worker)]
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(benchmarks), os.environ.get("PYTHONPATH", "")]),
            "RANKS": str(self.ranks_per_host),
            "RATE": self.rate,
        }
        command += [config.to_json(), str(steps)]
        found = run_launched(self.area, side.label, command, environment, HOSTS, self.limit_s)
        return HostsRun(
            step_ms=max(host["step_ms"] for host in found),
            sent_mb=[host["sent_mb"] for host in found],
        )
