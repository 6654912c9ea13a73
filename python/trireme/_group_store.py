"""The Store behind a process group of torch.distributed."""

import torch.distributed as dist
from torch.distributed import distributed_c10d


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """Where the ranks of ``group`` met, with the group's own prefix; None if torch does not know the group."""
    entry = distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]
