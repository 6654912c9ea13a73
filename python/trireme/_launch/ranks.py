"""What every data-parallel script needs and otherwise writes by hand."""

import numbers
from typing import overload

import torch
import torch.distributed as dist

from trireme._C import rank_seed
from trireme._core.group_communicator import device_of_numbers
from trireme._launch import AREA, refuse


@overload
def all_mean(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor: ...


@overload
def all_mean(value: float, group: dist.ProcessGroup | None = None) -> float: ...


def all_mean(
    value: torch.Tensor | float, group: dist.ProcessGroup | None = None
) -> torch.Tensor | float:
    """The mean of ``value`` over the ranks of ``group``, on all of them; every rank calls it.

    A number gives a float. A tensor, of the same shape and dtype on all ranks, gives a new one
    without gradient history: floating and complex dtypes are kept (half precision is summed in
    fp32), integers and bools become the default dtype. One small all-reduce, waited for.
    """
    _expect_run("all_mean", group)
    if isinstance(value, torch.Tensor):
        return _mean_of_tensor(value, group)
    if not isinstance(value, numbers.Real):
        refuse(
            f"all_mean got {type(value).__name__}, expected a real number or a tensor",
            "Convert the value first.",
            kind=TypeError,
        )
    device = device_of_numbers(group or dist.group.WORLD)
    total = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return float(total.item()) / dist.get_world_size(group)


def rank_generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A random generator that differs between ranks and is the same in every run.

    For what ranks must draw independently (augmentation, dropout, noise). Ranks and neighbouring
    seeds give unrelated streams: ``seed + rank`` would make rank 1 of one run equal rank 0 of the
    next.
    """
    _expect_run("rank_generator", None)
    AREA.expect("seed", seed, int, "int", next_step="Pass a whole number.")
    return torch.Generator(device).manual_seed(rank_seed(_folded(seed), dist.get_rank()))


def _folded(seed: int) -> int:
    """Returns 64 bits on which all bits of a longer seed have a say."""
    mask = 2**64 - 1
    if -(2**63) <= seed <= mask:
        return seed & mask
    return (seed & mask) ^ rank_seed(_folded(seed >> 64), 0)


def _mean_of_tensor(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if value.layout != torch.strided:
        refuse(
            f"all_mean got a tensor of layout {value.layout}, expected torch.strided",
            "Pass value.to_dense().",
        )
    kept = value.is_floating_point() or value.is_complex()
    sum_dtype = value.dtype
    if not kept:
        sum_dtype = torch.float64
    elif not value.is_complex() and value.dtype.itemsize < 4:
        sum_dtype = torch.float32
    total = value.detach().to(sum_dtype, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    mean = total.div_(dist.get_world_size(group))
    return mean.to(value.dtype if kept else torch.get_default_dtype())


def _expect_run(caller: str, group: dist.ProcessGroup | None) -> None:
    if not dist.is_initialized():
        refuse(f"{caller} was called before init()", "Call trireme.init() first.")
    if group is not None:
        next_step = "Pass a group of torch.distributed that this rank belongs to."
        AREA.expect("group", group, dist.ProcessGroup, "a ProcessGroup", next_step=next_step)
