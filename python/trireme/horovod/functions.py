"""Horovod's functions over tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from trireme.horovod.compression import Compression
from trireme.horovod.engine import Named, Terms
from trireme.horovod.errors import NotPossible, operation_error, refuse
from trireme.horovod.process_sets import ProcessSet, global_process_set, id_of
from trireme.horovod.reductions import (
    Adasum,
    Average,
    ReduceOp,
    Reduction,
    Sum,
    chosen_op,
    known_op,
)
from trireme.horovod.run import engine

Tensors = Sequence[torch.Tensor]


# --- what every function does --------------------------------------------------------------------


def group_of(kind: str, name: str | None, process_set: ProcessSet) -> dist.ProcessGroup:
    """Returns the group of a set. Raises HorovodInternalError on a rank outside of it."""
    running, set_id = engine(), id_of(process_set)
    if running.rank not in (process_set.ranks or ()):
        what = f"rank {running.rank} is not in {process_set}"
        raise operation_error(kind, name or "", what, running.rank, running.world)
    return running.groups[set_id]


def issue(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    terms: Terms,
    work: Callable[[dist.ProcessGroup, list[str]], Any],
    *,
    payload: str = "",
    waits: bool = False,
) -> Any:
    """Issues an operation on the ranks of a set; ``work`` gets its group and all payloads.

    Returns its handle; if it ``waits``, its result.
    """
    group = group_of(kind, name, process_set)
    running, set_id = engine(), id_of(process_set)
    named = Named(kind, running.name_for(kind, name, set_id), set_id, terms, payload=payload)
    begin = running.run if waits else running.issue
    return begin(named, lambda payloads: work(group, payloads))


def check_tensor(tensor: Any) -> None:
    """Raises TypeError for what is no tensor, ValueError for one that is not dense."""
    if not isinstance(tensor, torch.Tensor):
        got = f"got {type(tensor).__name__} as tensor, expected a torch.Tensor"
        refuse(got, "Pass a tensor.", kind=TypeError)
    if tensor.layout != torch.strided:
        got = f"got a tensor of layout {tensor.layout}, expected a dense one"
        refuse(got, "Use hvd.sparse_allreduce_async() for a sparse one.")


def _dtypes(tensors: Tensors) -> str:
    return ", ".join([_dtype(tensor.dtype) for tensor in tensors])


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shapes(tensors: Tensors, first: int = 0) -> str:
    return ", ".join([str(list(tensor.shape[first:])) for tensor in tensors])


def _terms_of_reduction(
    dtypes: str, shapes: str, op: ReduceOp, factors: tuple[float, float]
) -> Terms:
    """What ranks must say alike of a reduction; ``give_zeros`` reads it."""
    return [
        ("dtype", dtypes),
        ("shape", shapes),
        ("op", op.name),
        ("prescale_factor", str(float(factors[0]))),
        ("postscale_factor", str(float(factors[1]))),
    ]


def poll(handle: int) -> bool:
    """Says whether an operation is done, so that ``synchronize`` would not wait."""
    return engine().is_done(handle)


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its result; None for a handle that was synchronized.

    Raises:
        HorovodInternalError: the operation failed.
    """
    return engine().wait(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the set have called it. It overtakes operations that wait."""
    issue("barrier", None, process_set, [], lambda group, _: None, waits=True)


# --- allreduce -----------------------------------------------------------------------------------


def check_adasum(op: ReduceOp, process_set: ProcessSet) -> None:
    size = process_set.size() or 1
    if op == Adasum and size & (size - 1):
        got = f"got Adasum over {size} ranks, expected 2, 4, 8 or another power of 2"
        refuse(got, "Use hvd.Average.")


def _named_allreduce(
    kind: str,
    name: str,
    set_id: int,
    tensors: tuple[tuple[torch.dtype, torch.Size], ...],
    op: ReduceOp,
    factors: tuple[float, float],
) -> Named:
    dtypes = ", ".join([_dtype(dtype) for dtype, _ in tensors])
    shapes = ", ".join([str(list(shape)) for _, shape in tensors])
    terms = _terms_of_reduction(dtypes, shapes, op, factors)
    return Named(kind, name, set_id, terms, can_have_zeros=op != Adasum)


# Programs reduce the same tensors again and again.
_named_allreduce_again = lru_cache(maxsize=4096)(_named_allreduce)


def _allreduce(
    kind: str,
    tensors: Tensors,
    in_place: bool,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    result: Callable[[list[torch.Tensor]], Any],
    waits: bool = False,
) -> Any:
    for tensor in tensors:
        check_tensor(tensor)
    running, set_id = engine(), id_of(process_set)
    if op is Adasum:
        check_adasum(op, process_set)
    reduction = Reduction(op, *factors)
    group = group_of(kind, name, process_set)

    def work(_: list[str]) -> Any:
        if not in_place:
            return result([reduction.of(tensor, group) for tensor in tensors])
        for tensor in tensors:
            reduction.in_place(tensor, group)
        return result(list(tensors))

    described = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
    if name is None:
        own = running.name_for(kind, None, set_id)
        named = _named_allreduce(kind, own, set_id, described, op, factors)
    else:
        named = _named_allreduce_again(kind, name, set_id, described, op, factors)
    return running.run(named, work) if waits else running.issue(named, work)


def give_zeros(kind: str, terms: Terms, set_id: int) -> None:
    """Takes part in an allreduce of the others after ``join``."""
    said = dict(terms)
    dtypes = [getattr(torch, name) for name in said["dtype"].split(", ")]
    shapes = json.loads(f"[{said['shape']}]")
    reduction = Reduction(
        ReduceOp[said["op"]], float(said["prescale_factor"]), float(said["postscale_factor"])
    )
    for dtype, shape in zip(dtypes, shapes, strict=True):
        reduction.of(torch.zeros(shape, dtype=dtype), engine().groups[set_id])


def _first(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to reduce a tensor over the ranks; ``synchronize`` returns another tensor."""
    factors = (prescale_factor, postscale_factor)
    return _allreduce(
        "allreduce", [tensor], False, name, chosen_op(op, average), factors, process_set, _first
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to reduce a tensor in place; ``synchronize`` returns the tensor itself."""
    factors = (prescale_factor, postscale_factor)
    return _allreduce(
        "allreduce", [tensor], True, name, chosen_op(op, average), factors, process_set, _first
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to reduce several tensors as one operation."""
    factors, kind = (prescale_factor, postscale_factor), "grouped allreduce"
    return _allreduce(
        kind, list(tensors), False, name, chosen_op(op, average), factors, process_set, list
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The same in place."""
    factors, kind = (prescale_factor, postscale_factor), "grouped allreduce"
    return _allreduce(
        kind, list(tensors), True, name, chosen_op(op, average), factors, process_set, list
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor in place and returns it."""
    chosen, factors = chosen_op(op, average), (prescale_factor, postscale_factor)
    return _allreduce(
        "allreduce", [tensor], True, name, chosen, factors, process_set, _first, waits=True
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors in place and returns them."""
    chosen, factors = chosen_op(op, average), (prescale_factor, postscale_factor)
    return _allreduce(
        "grouped allreduce", list(tensors), True, name, chosen, factors, process_set, list, True
    )


def _reduced(
    options: tuple[Any, ...], name: str | None, tensors: Tensors
) -> tuple[torch.Tensor, ...]:
    op, before, after, process_set = options
    kind = "allreduce" if len(tensors) == 1 else "grouped allreduce"
    factors = (before, after)
    return _allreduce(kind, tensors, False, name, op, factors, process_set, tuple, waits=True)


def _reduced_for_backward(
    options: tuple[Any, ...], name: str | None, tensors: Tensors
) -> tuple[torch.Tensor, ...]:
    for tensor in tensors:
        check_tensor(tensor)
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return _Allreduce.apply(options, name, *tensors)
    return _reduced(options, name, tensors)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], name: str | None, *tensors: Any) -> Any:
        ctx.options = options
        return _reduced(options, name, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, before, after, process_set = ctx.options
        reduced = [
            allreduce(one, None, None, Compression.none, op, before, after, process_set)
            for one in gradients
        ]
        return (None, None, *reduced)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns a tensor reduced over the ranks; differentiable."""
    options = (chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    compressed, ctx = compression.compress(tensor)
    return compression.decompress(_reduced_for_backward(options, name, [compressed])[0], ctx)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Returns several tensors reduced as one operation; differentiable."""
    options = (chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = _reduced_for_backward(options, name, [tensor for tensor, _ in compressed])
    return [
        compression.decompress(one, ctx) for one, (_, ctx) in zip(reduced, compressed, strict=True)
    ]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begins to reduce a sparse tensor; the result is called to wait for it, as in Horovod."""
    chosen = known_op(op)
    indices = allgather_async(
        tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set
    )
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def handle() -> torch.Tensor:
        summed = synchronize(values)
        where = synchronize(indices).transpose(0, 1)
        if chosen == Average:
            summed = summed / process_set.size()
        return torch.sparse_coo_tensor(where, summed, tensor.size())

    return handle


# --- allgather -----------------------------------------------------------------------------------


def _allgather(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[list[torch.Tensor]], Any],
    waits: bool = False,
) -> Any:
    for tensor in tensors:
        check_tensor(tensor)
    rows = [tensor.detach().reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]

    def work(group: dist.ProcessGroup, payloads: list[str]) -> Any:
        counts = [json.loads(payload) for payload in payloads]
        return result(
            [gather_rows(one, [count[i] for count in counts], group) for i, one in enumerate(rows)]
        )

    terms = [
        ("dtype", _dtypes(tensors)),
        ("number of dimensions", str([one.dim() for one in rows])),
        ("shape behind the first dimension", _shapes(rows, 1)),
    ]
    payload = str([one.shape[0] for one in rows])
    return issue(kind, name, process_set, terms, work, payload=payload, waits=waits)


def gather_rows(tensor: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the tensors of all ranks one behind the other; ``counts`` are their rows."""
    most = max(counts)
    own = tensor.detach().contiguous()
    if own.shape[0] < most:
        padded = own.new_zeros((most, *own.shape[1:]))
        padded[: own.shape[0]] = own
        own = padded
    gathered = own.new_empty((len(counts) * most, *own.shape[1:]))
    if gathered.numel():
        dist.all_gather_into_tensor(gathered, own, group=group)
    if min(counts) == most:
        return gathered
    parts = gathered.view(len(counts), most, *own.shape[1:]) if gathered.numel() else None
    if parts is None:
        return own.new_empty((sum(counts), *own.shape[1:]))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins to put the tensors of all ranks one behind the other along the first dimension."""
    return _allgather("allgather", [tensor], name, process_set, _first)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The same for several tensors as one operation."""
    return _allgather("grouped allgather", list(tensors), name, process_set, list)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Any) -> Any:
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.process_set = process_set
        kind = "allgather" if len(tensors) == 1 else "grouped allgather"
        return _allgather(kind, tensors, name, process_set, tuple, waits=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows = [shape[0] if shape else 1 for shape in ctx.shapes]
        of_all = allgather(torch.tensor([rows]), process_set=ctx.process_set)
        before = of_all[: ctx.process_set.rank()].sum(0).tolist()
        found = []
        for gradient, shape, first, count in zip(gradients, ctx.shapes, before, rows, strict=True):
            averaged = allreduce(gradient, op=Average, process_set=ctx.process_set)
            found.append(averaged.narrow(0, first, count).reshape(shape))
        return (None, None, *found)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensors of all ranks one behind the other; first dimensions may differ."""
    return _Allgather.apply(name, process_set, tensor)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """The same for several tensors as one operation."""
    return list(_Allgather.apply(name, process_set, *tensors))


# --- broadcast -----------------------------------------------------------------------------------


def _broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    waits: bool = False,
) -> Any:
    check_tensor(tensor)

    def work(group: dist.ProcessGroup, _: list[str]) -> torch.Tensor:
        if root_rank not in (process_set.ranks or ()):
            got = f"got root rank {root_rank}, expected a rank of {process_set}"
            raise NotPossible(got)
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        if values.numel():
            dist.broadcast(values, root_rank, group=group)
        if output is None:
            return values
        with torch.no_grad():
            output.detach().copy_(values)
        return output

    terms = [
        ("dtype", _dtypes([tensor])),
        ("shape", _shapes([tensor])),
        ("root rank", str(root_rank)),
    ]
    return issue("broadcast", name, process_set, terms, work, waits=waits)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to send the root's tensor to all; ``root_rank`` is the number among all ranks."""
    return _broadcast(tensor, None, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The same in place."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Writes the root's values into the tensor and returns it."""
    return _broadcast(tensor, tensor, root_rank, name, process_set, waits=True)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return _broadcast(tensor, None, root_rank, name, process_set, waits=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        averaged = allreduce(gradient, op=Average, process_set=ctx.process_set)
        if engine().rank != ctx.root_rank:
            averaged = averaged * 0
        return averaged, None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the root's tensor; differentiable."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


# --- alltoall ------------------------------------------------------------------------------------


def _splits_of(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    if splits is None:
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows % size:
            got = f"got {rows} rows for {size} ranks, expected a multiple"
            refuse(got, "Pass splits, or another number of rows.")
        return [rows // size] * size
    given = splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits)
    if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool:
        refuse(f"got splits of {given.dtype}, expected integers", "Pass how many rows each gets.")
    found = [int(one) for one in given.reshape(-1)]
    rows = tensor.shape[0] if tensor.dim() else 0
    if len(found) != size or min(found) < 0 or sum(found) != rows:
        got = f"got splits {found} of {rows} rows, expected {size} numbers that add up to them"
        refuse(got, "Pass how many rows each rank gets.")
    return found


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to send slices of the first dimension to all ranks; ``synchronize`` returns what came
    and how many rows came from each."""
    return _alltoall(tensor, splits, name, process_set)


def _alltoall(
    tensor: torch.Tensor,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
    waits: bool = False,
) -> Any:
    check_tensor(tensor)
    id_of(process_set)
    if tensor.dim() == 0:
        own = [0] * (process_set.size() or 1)
    else:
        own = _splits_of(tensor, splits, process_set.size() or 1)
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)

    def work(group: dist.ProcessGroup, payloads: list[str]) -> Any:
        if tensor.dim() == 0:
            raise NotPossible("got a scalar, expected a tensor with a first dimension")
        received = [json.loads(payload)[group.rank()] for payload in payloads]
        came = tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(came, tensor.detach().contiguous(), received, own, group=group)
        return came, torch.tensor(received, dtype=like.dtype, device=like.device)

    terms = [
        ("dtype", _dtypes([tensor])),
        ("number of dimensions", str(tensor.dim())),
        ("shape behind the first dimension", _shapes([tensor], 1)),
    ]
    payload = str(own)
    return issue("alltoall", name, process_set, terms, work, payload=payload, waits=waits)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        came, received = _alltoall(tensor, splits, name, process_set, waits=True)
        ctx.process_set, ctx.received = process_set, received
        if splits is None:
            return came
        ctx.mark_non_differentiable(received)
        return came, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        back, _ = alltoall(gradient, splits=ctx.received, process_set=ctx.process_set)
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns what all ranks have sent to this one; with ``splits`` also how many rows each."""
    return _Alltoall.apply(tensor, splits, name, process_set)


# --- reducescatter -------------------------------------------------------------------------------


def _reducescatter(
    kind: str,
    tensors: Tensors,
    name: str | None,
    op: Any,
    process_set: ProcessSet,
    factors: tuple[float, float],
    result: Callable[[list[torch.Tensor]], Any],
    waits: bool = False,
) -> Any:
    for tensor in tensors:
        check_tensor(tensor)
    chosen = known_op(op)
    reduction = Reduction(chosen, *factors)

    def work(group: dist.ProcessGroup, _: list[str]) -> Any:
        if chosen == Adasum:
            raise NotPossible("got Adasum, expected another reduction")
        if any(tensor.dim() == 0 for tensor in tensors):
            raise NotPossible("got a scalar, expected a tensor with a first dimension")
        return result([reduction.scattered(tensor, group) for tensor in tensors])

    terms = _terms_of_reduction(_dtypes(tensors), _shapes(tensors), chosen, factors)
    return issue(kind, name, process_set, terms, work, waits=waits)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins to reduce a tensor, of which each rank gets its rows; the first ranks one more."""
    factors = (prescale_factor, postscale_factor)
    return _reducescatter("reducescatter", [tensor], name, op, process_set, factors, _first)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """The same for several tensors as one operation."""
    factors, kind = (prescale_factor, postscale_factor), "grouped reducescatter"
    return _reducescatter(kind, list(tensors), name, op, process_set, factors, list)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], name: str | None, *tensors: Any) -> Any:
        ctx.options = options
        op, process_set, *factors = options
        kind = "reducescatter" if len(tensors) == 1 else "grouped reducescatter"
        return _reducescatter(kind, tensors, name, op, process_set, tuple(factors), tuple, True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, process_set, before, after = ctx.options
        factor = before * after * (process_set.size() if op == Sum else 1)
        found = [allgather(gradient * factor, process_set=process_set) for gradient in gradients]
        return (None, None, *found)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of the reduced tensor; differentiable."""
    compressed, ctx = compression.compress(tensor)
    options = (known_op(op), process_set, prescale_factor, postscale_factor)
    return compression.decompress(_Reducescatter.apply(options, name, compressed)[0], ctx)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """The same for several tensors as one operation."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    options = (known_op(op), process_set, prescale_factor, postscale_factor)
    scattered = _Reducescatter.apply(options, name, *(tensor for tensor, _ in compressed))
    return [
        compression.decompress(one, ctx)
        for one, (_, ctx) in zip(scattered, compressed, strict=True)
    ]


# --- join ----------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and takes part with zeros in allreduces of the others,
    and in backwards of DistributedOptimizer, until all have joined. Returns the rank that joined
    last.

    ``device`` is accepted; zeros lie where the group takes tensors.
    """
    running = engine()
    running.zeros = give_zeros
    return running.join()
