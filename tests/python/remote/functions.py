"""Functions that ranks of the tests call, and a gate in each process that holds some of them up."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from trireme import remote

from harness.meeting import PATIENCE_S

# Within that time an owner frees what nobody refers to any more.
FREED_S = 2.0

gate = threading.Event()
entered = threading.Event()


@remote.function
def add(a: Any, b: Any) -> Any:
    return a + b


@remote.function
def echo(value: Any) -> Any:
    return value


@remote.function
def rank_there() -> int:
    return dist.get_rank()


@remote.function
def type_there(value: Any) -> str:
    return type(value).__name__


@remote.function
def gated(number: int) -> int:
    """Returns when somebody has opened the gate of that process."""
    entered.set()
    assert gate.wait(PATIENCE_S)
    return number


@remote.function
def open_gate() -> None:
    gate.set()
