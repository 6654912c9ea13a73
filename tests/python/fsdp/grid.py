"""A mesh of two replicas of two shards, and the programs of its four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.meeting import group_of_ranks
from harness.ranks import run_ranks

WORLD = 4
NAMES = ("replicate", "shard")


def on_grid(backend: str, *programs: Callable[..., None]) -> None:
    """Runs them one after another on two replicas of two shards; they get the mesh."""
    run_ranks(one_after_another, WORLD, backend, programs)


def one_after_another(rank: int, backend: str, programs: Any) -> None:
    with group_of_ranks(backend):
        for program in programs:
            torch.manual_seed(0)
            program(rank, grid())


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)


def gloo_grid(rank: int) -> DeviceMesh:
    """Makes a grid for torch's class."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    own = [groups[rank % 2], groups[2 + rank // 2]]
    return DeviceMesh.from_group(own, "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=NAMES)
