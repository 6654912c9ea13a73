"""What the tests of the backend ``trireme`` share: values, the plain reference, bits."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
WORLDS = (1, 2, 3, 4)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALVES = (torch.float16, torch.bfloat16)
REALS = (*HALVES, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCED = (torch.bool, *INTEGERS, *REALS, *COMPLEX)
# float8 has no arithmetic, and the wider unsigned integers next to none: they are moved.
MOVED = (
    *REDUCED,
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def values(rank: int, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What that rank holds: random, but every rank can compute what the others have."""
    sizes = [shape] if isinstance(shape, int) else list(shape)
    generator = torch.Generator().manual_seed(1 + rank)
    if dtype.is_complex or dtype in (torch.float32, torch.float64):
        return torch.randn(sizes, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 200, sizes, generator=generator).to(dtype)


def of_all(world: int, shape: int | Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, shape, dtype) for rank in range(world)]


def reduced(
    op: Any, sources: Sequence[torch.Tensor], factors: Sequence[float] = ()
) -> torch.Tensor:
    """One process reduces: from left to right, 16-bit floats in fp32 with one rounding at the end.

    ``factors`` are those of PREMUL_SUM, by rank.
    """
    dtype = sources[0].dtype
    computed = torch.float32 if dtype in HALVES else dtype
    if dtype == torch.bool:  # torch's sum of bools is "or", its product "and"
        computed = torch.uint8
    terms = [source.to(computed) for source in sources]
    if dtype.is_complex:  # real and imaginary parts each by themselves
        terms = [torch.view_as_real(term) for term in terms]
    if factors:
        exact = torch.float64 if terms[0].dtype == torch.float64 else torch.float32
        terms = [
            term * torch.tensor(factor, dtype=exact)
            for term, factor in zip(terms, factors, strict=True)
        ]
    folds = {
        dist.ReduceOp.SUM: torch.bitwise_or if dtype == torch.bool else torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    fold = folds.get(op, torch.add)
    if dtype.is_complex and op == dist.ReduceOp.PRODUCT:
        return functools.reduce(torch.mul, sources)
    result = functools.reduce(fold, terms)
    if op == dist.ReduceOp.AVG:
        result = divided(result, len(sources))
    return torch.view_as_complex(result) if dtype.is_complex else result.to(dtype)


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return reduced(dist.ReduceOp.SUM, tensors)


def divided(total: torch.Tensor, by: int) -> torch.Tensor:
    """An average; of integers towards zero."""
    if total.is_floating_point():
        return total / by
    return total.long().div(by, rounding_mode="trunc").to(total.dtype)


def backend_of(group: Any = None) -> Any:
    """The c10d::Backend itself, without what torch.distributed does to arguments."""
    group = group or dist.group.WORLD
    return group._get_backend(torch.device("cpu"))
