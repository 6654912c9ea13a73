"""Methods of gradient compression, as values; ``trireme.compression`` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trireme import _C


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


_coders: WeakKeyDictionary[nn.Module, _C.Ddp] = WeakKeyDictionary()


def note_codes(module: nn.Module, core: _C.Ddp) -> None:
    """Gradients of ``module`` are compressed by ``core``."""
    _coders[module] = core


def coders_in(model: nn.Module) -> list[tuple[str, _C.Ddp]]:
    """Who compresses in ``model``, with what comes before its names in the plain model."""
    found = []
    for path, module in model.named_modules():
        core = _coders.get(module)
        if core is not None:
            found.append((f"{path}.module." if path else "", core))
    return found


def state_of(model: nn.Module) -> dict[str, Residual]:
    """Returns what codes have left out on this rank, by the name in the plain model.

    Of parameters that go as fp32 there is nothing. Under ``between="ranks"`` all of a parameter is
    there, else the part that this rank codes for its host. Values are shared with the model: they
    change in the next step.
    """
    return {
        prefix + name: Residual(*part)
        for prefix, core in coders_in(model)
        for name, part in core.residuals().items()
    }
