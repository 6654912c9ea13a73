"""How much memory this machine has, and this process."""

import resource
from pathlib import Path


def available_bytes() -> int:
    """What programs can still have on this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def mapped_bytes() -> int:
    """What RLIMIT_AS limits."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
