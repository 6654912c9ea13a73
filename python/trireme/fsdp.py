"""fully_shard: parameters, gradients and optimizer state sharded over the ranks; and what stands
beside it in ``torch.distributed.fsdp``."""

from typing import TYPE_CHECKING, Any

from torch.distributed import fsdp as _torchs
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
    share_comm_ctx,
)

from trireme._fsdp.fully_shard import fully_shard
from trireme._fsdp.module import FSDPModule, UnshardHandle
from trireme._fsdp.offload import Offload

if TYPE_CHECKING:  # torch 2.11 has none of these
    from torch.distributed.fsdp import DataParallelMeshDims, GradientReductionHandle

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "Offload",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
if not TYPE_CHECKING:
    __all__ = [name for name in __all__ if name in globals() or hasattr(_torchs, name)]


def __getattr__(name: str) -> Any:
    if name in ("DataParallelMeshDims", "GradientReductionHandle"):
        return getattr(_torchs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Users import them from here, and so they are printed and pickled.
FSDPModule.__module__ = __name__
UnshardHandle.__module__ = __name__
Offload.__module__ = __name__
fully_shard.__module__ = __name__
