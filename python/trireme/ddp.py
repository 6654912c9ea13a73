"""DistributedDataParallel: torch's class, with Trireme's C++ core underneath."""

from trireme._ddp.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

# Users import it from here, and so it is printed and pickled.
DistributedDataParallel.__module__ = __name__
