"""The reductions, by Horovod's names."""

from __future__ import annotations

import enum
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from trireme import _C
from trireme.horovod.errors import refuse


class ReduceOp(enum.IntEnum):
    """Numbers as Horovod has them."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

_IN_TORCH = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_CPU = torch.device("cpu")
_COMPUTED_IN_FP32 = (torch.float16, torch.bfloat16)


def chosen_op(op: Any, average: bool | None) -> ReduceOp:
    """Returns what ``op=`` or the older ``average=`` asks for."""
    if op is not None and average is not None:
        got = "got average= beside op=, expected one of them"
        refuse(got, "The op parameter supersedes average. Leave out average.")
    if average is not None:
        text = "Parameter `average` has been replaced with `op` and will be removed in v1.0"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return known_op(Average if op is None else op)


def known_op(op: Any) -> ReduceOp:
    """Returns a reduction. Raises ValueError for what is none."""
    if type(op) is ReduceOp:
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        got = f"got op={op!r}, expected one of {', '.join(one.name for one in ReduceOp)}"
        refuse(got, "Pass hvd.Average or hvd.Sum.")


class Reduction:
    """One reduction of tensors over a group, with factors before and after it."""

    def __init__(self, op: ReduceOp, before: float, after: float) -> None:
        self.op, self.before, self.after = op, before, after

    def of(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Returns a tensor of its own, in which ``tensor`` is reduced."""
        values = self.prepared(tensor)
        if self.op == Adasum:
            return self.finished(adasum(values, group), tensor.dtype, group.size())
        return self._all_reduced(values, group).to(tensor.dtype)

    def in_place(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Writes what :meth:`of` would return into ``tensor``, which may be a view."""
        values = tensor.detach()
        needs_copy = values.dtype in _COMPUTED_IN_FP32 or not values.is_contiguous()
        if needs_copy or self.before != 1.0 or self.op == Adasum:
            values.copy_(self.of(values, group))
            return
        reduced = self._all_reduced(values, group)
        if reduced is not values:
            values.copy_(reduced)

    def _all_reduced(self, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Reduces in place, and returns ``values`` or, for scaled integers, another tensor."""
        takes_mean = self.op == Average and self.after == 1.0 and _has_averages(values, group)
        op = dist.ReduceOp.AVG if takes_mean else _IN_TORCH[self.op]
        if values.dtype.is_complex:
            dist.all_reduce(values, op, group=group)
        else:
            group.allreduce([values], _options_of(op)).wait()
        return values if takes_mean else self.finished(values, values.dtype, group.size())

    def scattered(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Returns this rank's rows of what :meth:`of` would give."""
        values = self.prepared(tensor)
        rows, world, rank = tensor.shape[0], group.size(), group.rank()
        most = -(-rows // world)
        if rows % world:
            padded = values.new_zeros((world * most, *values.shape[1:]))
            for other in range(world):
                first, count = _rows_of(other, rows, world)
                padded[other * most : other * most + count] = values[first : first + count]
            values = padded
        own = values.new_empty((most, *values.shape[1:]))
        if own.numel():
            dist.reduce_scatter_tensor(own, values.contiguous(), _IN_TORCH[self.op], group=group)
        count = _rows_of(rank, rows, world)[1]
        return self.finished(own[:count].clone(), tensor.dtype, world)

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy, in the dtype of the computation."""
        dtype = torch.float32 if tensor.dtype in _COMPUTED_IN_FP32 else tensor.dtype
        values = tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        return _scaled(values, self.before)

    def finished(self, values: torch.Tensor, dtype: torch.dtype, world: int) -> torch.Tensor:
        divisor = world if self.op == Average else 1
        return _scaled(values, self.after, divisor).to(dtype)


def _has_averages(values: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Says whether the engine divides in the pass in which it sums: ours does, on the CPU."""
    if values.dtype.is_complex or values.dtype == torch.bool or not values.is_cpu:
        return False
    return bool(group._get_backend(_CPU).name() == "trireme")


@cache
def _options_of(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _scaled(values: torch.Tensor, factor: float, divisor: int = 1) -> torch.Tensor:
    """Returns ``values * factor / divisor``, in place where that is of floating point."""
    if factor == 1.0 and divisor == 1:
        return values
    if values.dtype.is_floating_point or values.dtype.is_complex:
        scaled = values if factor == 1.0 else values.mul_(factor)
        return scaled if divisor == 1 else scaled.div_(divisor)
    return (values.double() * factor / divisor).to(values.dtype)  # truncates


def _rows_of(rank: int, rows: int, world: int) -> tuple[int, int]:
    """Returns the first row of a rank, and how many it has: the first ranks have one more."""
    each, more = divmod(rows, world)
    return rank * each + min(rank, more), each + (rank < more)


def adasum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the sum in which what two ranks agree on counts once: a tree over the ranks in which
    neighbours meet first."""
    flat = values.reshape(-1)
    gathered = flat.new_empty(group.size() * flat.numel())
    if flat.numel():
        dist.all_gather_into_tensor(gathered, flat, group=group)
    return _C.adasum(list(gathered.view(group.size(), -1))).reshape(values.shape)
