"""A table of one element to which each worker adds one in each clock."""

from __future__ import annotations

from typing import Any

import torch
from trireme import ps


def table_of_counts() -> ps.Dense:
    return ps.Dense("counts", {"x": torch.zeros(1)}, optimizer=ps.Sum(), reduction="sum")


def counts(**options: Any) -> ps.ParameterServer:
    """A server of that table alone."""
    return ps.ParameterServer([table_of_counts()], **options)


def push_and_clock(server: ps.ParameterServer) -> None:
    server["counts"].push({"x": torch.ones(1)})
    server.clock()
