"""fully_shard: parameters, gradients and optimizer state sharded over the ranks."""

from trireme._fsdp.fully_shard import fully_shard
from trireme._fsdp.module import FSDPModule
from trireme._fsdp.offload import Offload

__all__ = ["FSDPModule", "Offload", "fully_shard"]

# Users import them from here, and so they are printed and pickled.
FSDPModule.__module__ = __name__
Offload.__module__ = __name__
fully_shard.__module__ = __name__
