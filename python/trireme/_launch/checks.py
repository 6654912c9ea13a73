"""What :func:`trireme.init` may be given, and the refusals."""

import math
import numbers
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trireme._core.durations import LONGEST_WAIT
from trireme._launch import AREA, refuse

Kind = TypeVar("Kind")


def expect(name: str, value: Kind | None, kind: type[Kind]) -> Kind | None:
    if value is not None:
        next_step = f"Pass {name} as {kind.__name__}, or leave it out."
        AREA.expect(name, value, kind, kind.__name__, next_step=next_step)
    return value


def as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    """``timeout``, or that many seconds; at most what a wait can last."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        limit = timeout
    elif isinstance(timeout, numbers.Real) and not isinstance(timeout, bool):
        longest = LONGEST_WAIT.total_seconds()
        seconds = float(max(min(timeout, longest), -longest))
        if math.isnan(seconds):
            refuse("timeout is nan, expected a number of seconds", "Pass a number of seconds.")
        limit = timedelta(seconds=seconds)
    else:
        refuse(
            f"timeout is {type(timeout).__name__}, expected seconds or a timedelta",
            "Pass a number of seconds.",
            kind=TypeError,
        )
    if limit <= timedelta(0):
        refuse(f"timeout is {limit}, expected more than 0", "Pass a longer timeout.")
    return min(limit, LONGEST_WAIT)


def parse_device(device: str | torch.device) -> torch.device:
    kinds, next_step = (str, torch.device), 'Pass "cpu", "cuda" or "cuda:1".'
    AREA.expect("device", device, kinds, "str or torch.device", next_step=next_step)
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        refuse(f"device is {str(device)!r}, expected cpu or cuda", 'Pass "cpu" or "cuda".')
    return parsed


def check_available(backend: str | None, environment: Any) -> None:
    if backend is None:
        return
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        if not dist.is_backend_available(name):
            refuse(
                f"backend is {backend!r}, and this torch has no backend {name!r}",
                "Use gloo, nccl, or a backend that torch.distributed lists.",
                rank=environment.rank,
                world=environment.world,
            )
