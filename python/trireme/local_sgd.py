"""Averages now and then: LocalSGD and DiLoCo, for links that are slow."""

from trireme._local_sgd.diloco import DiLoCo
from trireme._local_sgd.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]

# Users import them from here, and so they are printed and pickled.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
