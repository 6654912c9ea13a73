"""Gradient compression: what gradients become on the links between hosts.

    from trireme import compression
    ddp = trireme.DistributedDataParallel(model, compression=compression.Int8())

Each method is a value; see ``docs/compression.md`` for which one suits which link.
"""

from trireme._core.compression import (
    Bf16,
    Compression,
    Fp16,
    Int4,
    Int8,
    PowerSGD,
    RandomK,
    Residual,
    Sign,
    TopK,
    state_of,
)
from trireme._core.compression_hook import HookState, hook

__all__ = [
    "Bf16",
    "Compression",
    "Fp16",
    "HookState",
    "Int4",
    "Int8",
    "PowerSGD",
    "RandomK",
    "Residual",
    "Sign",
    "TopK",
    "hook",
    "state_of",
]

# Users import them from here, and so they are printed and pickled.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
