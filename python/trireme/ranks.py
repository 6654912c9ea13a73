"""What every data-parallel script needs and otherwise writes by hand."""

from trireme._core.rank_log import get_logger
from trireme._launch.ranks import all_mean, rank_generator

__all__ = ["all_mean", "get_logger", "rank_generator"]

# Users import them from here, and so they are printed and pickled.
all_mean.__module__ = __name__
get_logger.__module__ = __name__
rank_generator.__module__ = __name__
