"""ZeroRedundancyOptimizer: optimizer state, and with stage 2 gradients, sharded over the ranks."""

from trireme._zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]

# Users import it from here, and so it is printed and pickled.
ZeroRedundancyOptimizer.__module__ = __name__
