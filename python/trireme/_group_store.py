"""The Store behind a process group of torch.distributed."""

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Where the ranks of ``group`` met, under its prefix; None for a group unknown to torch."""
    entry = distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]
