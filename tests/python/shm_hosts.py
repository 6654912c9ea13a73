"""Ranks of the backend ``trireme`` that behave as if they were on several hosts."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from distributed import run_ranks

# By rank: the host that it says it is on.
LAYOUTS = {"2x2": "aabb", "apart": "abab", "1+3": "abbb", "1+1+2": "abcc", "alone": "abc"}
SOME_LAYOUTS = ("2x2", "1+3", "1+1+2")


def join(rank: int, layout: str, timeout_s: float = 30) -> Any:
    options = SimpleNamespace(host_partition=LAYOUTS[layout][rank])
    dist.init_process_group("trireme", timeout=timedelta(seconds=timeout_s), pg_options=options)
    return options


def under(rank: int, layout: str, program: Callable[..., Any], args: Sequence[Any]) -> Any:
    join(rank, layout)
    torch.manual_seed(0)
    result = program(rank, dist.get_world_size(), *args)
    dist.destroy_process_group()
    return result


def on_hosts(layout: str, program: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
    return run_ranks(under, len(LAYOUTS[layout]), layout, program, args, timeout=timeout)
