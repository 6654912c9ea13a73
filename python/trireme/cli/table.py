"""What the tables of ``plan`` have in common."""

from __future__ import annotations

import torch

from trireme._core.errors import Area

COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


def unit_for(most: int) -> tuple[int, str]:
    """The bytes of the unit in which numbers up to ``most`` are shown, and its name."""
    return next((unit for unit in _UNITS if most >= unit[0]), _UNITS[-1])


def dtype_of(name: str | None) -> torch.dtype | None:
    """Returns the dtype that torch calls so. Raises ValueError if there is none."""
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        got = f"got dtype '{name}', expected one of torch"
        Area("plan").refuse(got, "Say for example bfloat16.")
    return dtype
