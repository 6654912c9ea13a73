"""The c10d backend ``trireme``: collectives of CPU ranks through the memory of their host."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from trireme import _C
from trireme._core.farewell import say_farewell_at_the_end

SHM = "trireme"


def register() -> None:
    """Make ``init_process_group("trireme")`` work; torch's entry point, and ``import trireme``."""
    if not hasattr(dist.Backend, SHM.upper()):
        dist.Backend.register_backend(SHM, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    say_farewell_at_the_end()
    partition = getattr(backend_options, "host_partition", "")  # tests set it
    return _C.make_shm_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        host_partition=partition,
    )
