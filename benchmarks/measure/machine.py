"""On which machine, with which software, from which commit a number was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch

ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_CONF")
NOT_MEASURED = ("benchmarks/results", "benchmarks/readme_*.py", "docs", "tests", "*.md")
REPOSITORY = Path(__file__).resolve().parents[2]


def cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def warn_if_busy() -> None:
    """Says so if other programs take more than half of the cores."""
    busy = os.getloadavg()[0]
    if busy > cores() / 2:
        print(f"The machine is busy (load {busy:.1f}): times will be unsteady.", flush=True)


def machine() -> dict[str, Any]:
    """The `machine` entry of every result file. No host name: results are public."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_1m": round(os.getloadavg()[0], 2),
        "allocator_env": allocator_environment(),
        "allocator": "kept warm on all sides (measure/memory.py)",
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def allocator_environment() -> dict[str, str]:
    """Variables that change how memory is allocated, and so how fast a side looks."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in ALLOCATOR_VARIABLES or (name.startswith("MALLOC_") and name.endswith("_"))
    }


def commit() -> str:
    """The last commit that changed what is measured, in short; with `+` if tracked files of it
    differ; `unknown` outside of a git checkout. Results, pages and tests may change meanwhile."""
    try:
        code = (":/", *(f":(exclude,top){path}" for path in NOT_MEASURED))
        last = _git("log", "-1", "--format=%h", "--", *code)
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
        return last + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
