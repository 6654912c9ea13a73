"""What a GradScaler finds in sharded gradients, where some lie whole on all ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_LOOK_FOR_INFS = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@functools.cache
def look_past_scalars() -> None:
    """From now on ranks tell each other of infs wherever any gradient of a list is cut.

    torch tells the ranks among which the first one is cut. A scalar's is cut nowhere: as the first
    one it would leave each rank to decide by its own shards of the others. A sharded one goes
    before it, which changes nothing else, since each is unscaled by itself; lists that begin with
    a sharded one stay as they are.
    """
    ways: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    of_torch = ways[_LOOK_FOR_INFS]

    def on_all_ranks(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradients, *others = args
        if _parts_of(gradients[0]) == 1:
            gradients = sorted(gradients, key=_parts_of, reverse=True)
        return of_torch(op, (gradients, *others), kwargs)

    ways[_LOOK_FOR_INFS] = on_all_ranks


def _parts_of(gradient: torch.Tensor) -> int:
    """Into how many parts it is cut."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
