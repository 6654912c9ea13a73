"""Trireme trains torch models in parallel: one C++ core, used from Python and from C++."""

from trireme._load_core import load_core

_C = load_core()

from trireme._shm_backend import register  # noqa: E402

register()

from trireme import optim  # noqa: E402
from trireme.clip_grad import clip_grad_norm_  # noqa: E402
from trireme.ddp import DistributedDataParallel  # noqa: E402
from trireme.host_writing import writing  # noqa: E402
from trireme.launch import Context, init, shutdown  # noqa: E402
from trireme.memory_estimate import MemoryBytes, MemoryEstimate, estimate_memory  # noqa: E402
from trireme.rank_log import get_logger  # noqa: E402
from trireme.ranks import all_mean, rank_generator  # noqa: E402
from trireme.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm  # noqa: E402
from trireme.zero import ZeroRedundancyOptimizer  # noqa: E402

del register

__all__ = [
    "Context",
    "DistributedDataParallel",
    "MemoryBytes",
    "MemoryEstimate",
    "SyncBatchNorm",
    "ZeroRedundancyOptimizer",
    "all_mean",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "estimate_memory",
    "get_logger",
    "init",
    "optim",
    "rank_generator",
    "shutdown",
    "writing",
]
