"""Methods of gradient compression, as values; ``trireme.compression`` shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trireme import _C
from trireme._core.errors import Area

_AREA = Area("compression")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What gradients become on the links between senders. See ``docs/compression.md``.

    A sender is a host, with all its ranks that share memory, or each rank for itself. Codes are
    made per parameter, in fp32; what a code leaves out of a gradient is kept, 4 bytes per element
    and sender, and added to the next one (``error_feedback``).

    Args:
        error_feedback: keep what codes leave out. Without it, it is lost.
        dense_below: parameters of fewer elements go as fp32, and so do those that a code would not
            shrink.
        between: ``"hosts"`` compresses what leaves a host, and nothing on a single host;
            ``"ranks"`` compresses what leaves a rank.

    Raises:
        ValueError: naming the argument.
    """

    error_feedback: bool = True
    dense_below: int = 1024
    between: str = "hosts"

    def __post_init__(self) -> None:
        self._core()

    def _core(self) -> Any:
        """The value of the same name that the core takes."""
        return getattr(_C, type(self).__name__)(**asdict(self))

    def bytes(self, shape: int | Sequence[int]) -> int:
        """Returns the bytes that one sender sends for a parameter of that shape in one journey."""
        return _C.code_bytes(self._core(), [shape] if isinstance(shape, int) else list(shape))


@dataclass(frozen=True, kw_only=True)
class Fp16(Compression):
    """Gradients rounded to fp16 and all-reduced: 2 bytes per element.

    torch: ``fp16_compress_hook``.
    """

    error_feedback: bool = False


@dataclass(frozen=True, kw_only=True)
class Bf16(Compression):
    """Gradients rounded to bf16 and all-reduced: 2 bytes per element.

    torch: ``bf16_compress_hook``.
    """

    error_feedback: bool = False


@dataclass(frozen=True)
class Int8(Compression):
    """8 bits per element and a scale per block: ``1 + 4 / block`` bytes.

    Args:
        block: elements that share a scale, their largest size.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down by chance, right on average, drawn
            from the step, the parameter and the sender.
    """

    block: int = 256
    rounding: str = "nearest"


@dataclass(frozen=True)
class Int4(Compression):
    """4 bits per element and a scale per block: ``1/2 + 4 / block`` bytes."""

    block: int = 64


@dataclass(frozen=True)
class Sign(Compression):
    """The sign of each element and the mean size of a block: ``1/8 + 4 / block`` bytes.

    signSGD with error feedback (Karimireddy et al., 2019).
    """

    block: int = 256


@dataclass(frozen=True)
class TopK(Compression):
    """The largest elements, whole, with their places: ``8 * density`` bytes per element.

    Deep Gradient Compression's choice (Lin et al., 2018). ``ceil(density * n)`` elements of each
    parameter are sent, or of each chunk of it. Ties go to the lower index.

    Args:
        density: in (0, 1].
        chunk: a power of two; the largest of each chunk of so many elements. Indices then take
            ``log2(chunk)`` bits.
        bits: of a value; 2 in chunks only: a sign, and which of two sizes, which are the means of
            the larger and of the smaller ones sent of a chunk (SparseLoCo, 2025).
        exact: parameters of 65,536 elements and more otherwise send those above a threshold, which
            is kept from step to step and corrected by a sample: at most as many, and 0.8 of them or
            more on average. Chunks are always exact.
        decay: how much of what was left out counts in the next step.
    """

    density: float
    chunk: int | None = None
    bits: int = 32
    exact: bool = False
    decay: float = 1.0


@dataclass(frozen=True)
class RandomK(Compression):
    """Elements at positions that all senders draw alike, all-reduced: ``4 * density`` bytes.

    One position is drawn in each of ``ceil(density * n)`` equal parts of a parameter, from seed,
    step and name; no index travels. Without error feedback values count 1 / density.
    """

    density: float
    seed: int = 0


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Each parameter as a product of two matrices: ``4 * rank * (m + n)`` bytes of ``m * n``.

    Vogels et al., 2019; torch: ``powerSGD_hook``. The matrix is the first dimension by the rest.

    Args:
        rank: of the approximation.
        start_step: steps before it go as fp32.
        min_ratio: parameters that would not shrink by so much go as fp32.
        seed: of the first matrices.
    """

    rank: int = 4
    start_step: int = 10
    min_ratio: float = 2
    seed: int = 0


class Residual(NamedTuple):
    """What the codes of one sender have left out of a parameter's gradients so far."""

    sender: int
    first: int
    """The place of the first of ``values`` in the flattened parameter."""
    values: torch.Tensor
    """fp32, flat; of a complex parameter its real numbers."""


class Codes(Protocol):
    """What compresses the gradients of a module or an optimizer."""

    def kept_codes(self) -> list[_C.KeptCodes]:
        """Returns what it keeps, by its own names."""


@dataclass(frozen=True)
class _Noted:
    codes: Codes
    wraps: str  # the name of the module in it that has the parameters, with a dot; "" for itself


_noted: WeakKeyDictionary[nn.Module | Optimizer, _Noted] = WeakKeyDictionary()


def note_codes(holder: nn.Module | Optimizer, codes: Codes, wraps: str = "") -> None:
    """Gradients of ``holder`` are compressed by ``codes``, which must not keep it alive."""
    _noted[holder] = _Noted(codes, wraps)


def codes_in(model: nn.Module | Optimizer) -> list[_C.KeptCodes]:
    """Returns what is kept of the gradients of ``model``, with names of the plain model."""
    if isinstance(model, Optimizer):
        noted = _noted.get(model)
        return [] if noted is None else noted.codes.kept_codes()
    found = []
    for path, module in model.named_modules():
        noted = _noted.get(module)
        if noted is None:
            continue
        before = f"{path}.{noted.wraps}" if path else ""
        for kept in noted.codes.kept_codes():
            kept.rename([before + name for name in kept.names], before)
            found.append(kept)
    return found


def core_of(compression: Compression | None) -> Any:
    """What the core takes for it."""
    return None if compression is None else compression._core()


def checked(compression: object, refuse: Callable[..., NoReturn]) -> Compression | None:
    """A method of ``trireme.compression``, or None; ``refuse`` is what an area calls so."""
    if compression is None or isinstance(compression, Compression):
        return compression
    refuse(
        f"got {type(compression).__name__} as compression, expected a method of "
        "trireme.compression",
        "Pass one such as trireme.compression.Int8().",
        kind=TypeError,
    )


def check_dense(modules: Iterable[nn.Module]) -> None:
    """There are no codes of sparse gradients.

    Raises:
        ValueError: a layer in ``modules`` makes some.
    """
    for module in modules:
        for name, layer in module.named_modules():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
                _AREA.refuse(
                    f"got sparse gradients of '{f'{name}.weight'.removeprefix('.')}', expected "
                    "dense ones",
                    "Leave sparse=True out of the layer, or compression out of the wrapper.",
                    rank=dist.get_rank(),
                    world=dist.get_world_size(),
                )


def state_of(model: nn.Module | Optimizer) -> dict[str, Residual]:
    """Returns what codes have left out on this rank, by the name in the plain model.

    Of parameters that go as fp32 there is nothing. Under ``between="ranks"`` all of a parameter is
    there, else the part that this rank codes for its host; of a shard that replicas code, that.
    Values are shared with the model: they change in the next step.

    Args:
        model: what was given ``compression``, a model that has it inside, or a
            ``ZeroRedundancyOptimizer``.
    """
    return {
        name: Residual(*part) for kept in codes_in(model) for name, part in kept.residuals().items()
    }
