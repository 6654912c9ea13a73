"""Trireme trains torch models in parallel: one C++ core, used from Python and from C++."""

from trireme._load_core import load_core

_C = load_core()

from trireme.ddp import DistributedDataParallel  # noqa: E402
from trireme.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm  # noqa: E402

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_sync_batchnorm"]
