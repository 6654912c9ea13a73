"""Scatter and gather of torch.nn.parallel."""

from trireme._data_parallel.scatter_gather import gather, scatter, scatter_kwargs

__all__ = ["gather", "scatter", "scatter_kwargs"]

# Users import them from here, and so they are printed and pickled.
gather.__module__ = __name__
scatter.__module__ = __name__
scatter_kwargs.__module__ = __name__
