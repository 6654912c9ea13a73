"""What the tests of the backend ``trireme`` share: values, the plain reference, bits."""

import functools
import inspect
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trireme import _C

from ddp.ranks import on_ranks, process_of, signature_without_rank

# May be another one, to run the tests of a strategy over that.
_BACKEND = os.environ.get("TRIREME_TEST_BACKEND", "trireme")
on_shm_ranks = functools.partial(on_ranks, backend=_BACKEND)

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "trireme"])

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


def on_shm_and_gloo_ranks(world: int | str, **options: Any) -> Any:
    """Runs the decorated test where ranks share memory, and where they do not; see on_ranks."""

    def decorate(program: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("backend", [_BACKEND, "gloo"])
        @functools.wraps(program)
        def test(backend: str, **case: Any) -> None:
            on_ranks(world, backend=backend, **options)(program)(**case)

        of_program = signature_without_rank(program)
        backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = of_program.replace(
            parameters=[*of_program.parameters.values(), backend]
        )
        return test

    return decorate


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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().reshape(-1).view(torch.uint8)


def assert_bits(got: torch.Tensor, expected: torch.Tensor, *case: object) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, case
    if not torch.equal(bits(got), bits(expected)):
        raise AssertionError(f"{case}: got {got.flatten()[:8]}, expected {expected.flatten()[:8]}")


def assert_lists(got: Sequence[Any], expected: Sequence[Any], *case: object) -> None:
    assert len(got) == len(expected), case
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_bits(one, other, *case, index)


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


def divided(total: torch.Tensor, by: int) -> torch.Tensor:
    """An average; of integers towards zero."""
    if total.is_floating_point():
        return total / by
    return total.long().div(by, rounding_mode="trunc").to(total.dtype)


def backend_of(group: Any = None) -> Any:
    """The c10d::Backend itself, without what torch.distributed does to arguments."""
    group = group or dist.group.WORLD
    return group._get_backend(torch.device("cpu"))


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    """Returns when that is so; asks every 10 ms."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """T is stopped; Z is dead, and so is who is there no more, or goes while it is read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def is_inside(pid: int, what: str) -> bool:
    """Says whether an onlooker sees it in a collective, or another wait, that holds this text."""
    for group in _C.examine_host([pid], timedelta(seconds=5), 1)["groups"]:
        for rank in group["ranks"]:
            begun = [
                operation for operation in rank["operations"] if operation["finished_s_ago"] is None
            ]
            places = [operation["operation"] for operation in begun] + [rank["waits_for"] or ""]
            if rank["pid"] == pid and any(place and what in place for place in places):
                return True
    return False


def until_inside(others: int | Iterable[int], what: str = "") -> None:
    """Until these ranks are seen in such a collective or wait, which this rank has to come to."""
    ranks = [others] if isinstance(others, int) else others
    processes = [process_of(rank) for rank in ranks]
    until(lambda: all(is_inside(process, what) for process in processes))


def files_in_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("trireme-*")}


def left_in_memory(before: Collection[str]) -> set[str]:
    """Files that were not there ``before`` and stay; those of other tests go when these meet."""
    left = files_in_memory() - set(before)
    deadline = time.monotonic() + 20
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= files_in_memory()
    return left
