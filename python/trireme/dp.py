"""DataParallel: torch's class, with replicas that stay and backwards without the GIL."""

from trireme._data_parallel.module import DataParallel

__all__ = ["DataParallel"]

# Users import it from here, and so it is printed and pickled.
DataParallel.__module__ = __name__
