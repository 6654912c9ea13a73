"""The beginning and the end of a run: which rank is this process, and which device is its own."""

import torch  # noqa: F401 - annotations of Context are looked up here

from trireme._launch.launch import Context, init, shutdown

__all__ = ["Context", "init", "shutdown"]

# Users import them from here, and so they are printed and pickled.
Context.__module__ = __name__
init.__module__ = __name__
shutdown.__module__ = __name__
