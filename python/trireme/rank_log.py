"""Logging that speaks once per run, not once per rank."""

from trireme._core.rank_log import get_logger

__all__ = ["get_logger"]

# Users import it from here, and so it is printed and pickled.
get_logger.__module__ = __name__
