"""Writes to parameters that the ranks of a host share."""

from trireme._core.writing import writing

__all__ = ["writing"]

# Users import it from here, and so it is printed and pickled.
writing.__module__ = __name__
