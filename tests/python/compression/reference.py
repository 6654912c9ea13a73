"""What the codes must compute, in numpy, and what a sender keeps of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from trireme import compression
from trireme.compression import Compression

Values = np.ndarray


def in_blocks(values: Values, block: int, decoded: Callable[[Values], Values]) -> Values:
    cuts = range(block, len(values), block)
    return np.concatenate([decoded(part) for part in np.split(values, list(cuts))])


def by_steps(top: int) -> Callable[[Values], Values]:
    def decoded(block: Values) -> Values:
        most = np.abs(block).max()
        with np.errstate(divide="ignore", over="ignore"):
            per_one = np.float32(top) / most
        if not np.isfinite(most):
            return np.full_like(block, np.nan)
        if most == 0 or not np.isfinite(per_one):
            return np.zeros_like(block)
        steps = np.clip(np.rint(block * per_one), -top, top)
        return np.asarray(steps * (most / np.float32(top)), np.float32)

    return decoded


LANES = 16


def sum_of_sizes(block: Values) -> np.float32:
    """In the order of the core: a sign that turns on the last bit of a mean turns here, too."""
    padded = np.zeros(-(-len(block) // LANES) * LANES, np.float32)
    padded[: len(block)] = np.abs(block)
    lanes = np.zeros(LANES, np.float32)
    for row in padded.reshape(-1, LANES):
        lanes += row
    width = LANES
    while (width := width // 2) > 0:
        lanes[:width] += lanes[width : 2 * width]
    return np.float32(lanes[0])


def by_signs(block: Values) -> Values:
    size = sum_of_sizes(block) / np.float32(len(block))
    return np.where(block < 0, -size, size).astype(np.float32)


def by_size(density: float) -> Callable[[Values], Values]:
    def decoded(run: Values) -> Values:
        order = np.lexsort((np.arange(len(run)), -np.abs(run)))
        chosen = order[: math.ceil(density * len(run))]
        sent = np.zeros_like(run)
        sent[chosen] = run[chosen]
        return sent

    return decoded


def by_two_sizes(density: float) -> Callable[[Values], Values]:
    """The means of the larger and of the smaller ones that are sent, as fp16."""

    def as_half(size: float) -> np.float32:
        return np.float32(np.float16(np.float32(min(size, 65504.0))))

    def decoded(run: Values) -> Values:
        order = np.lexsort((np.arange(len(run)), -np.abs(run)))
        chosen = np.sort(order[: math.ceil(density * len(run))])
        sizes = [float(abs(one)) for one in run[chosen]]
        mean = sum(sizes) / len(sizes)
        large = [size for size in sizes if size >= mean]
        small = (sum(sizes) - sum(large)) / max(1, len(sizes) - len(large))
        of_large, of_small = as_half(sum(large) / max(1, len(large))), as_half(small)
        sent = np.zeros_like(run)
        for place, size in zip(chosen, sizes, strict=True):
            sent[place] = np.copysign(of_large if size >= mean else of_small, run[place])
        return sent

    return decoded


def decoded(method: Compression, values: Values) -> Values:
    """What the others make of a code of these values."""
    if method.bytes(len(values)) == 4 * len(values):
        return values
    if isinstance(method, compression.Int8):
        return in_blocks(values, method.block, by_steps(127))
    if isinstance(method, compression.Int4):
        return in_blocks(values, method.block, by_steps(7))
    if isinstance(method, compression.Sign):
        return in_blocks(values, method.block, by_signs)
    if isinstance(method, compression.TopK):
        code = by_two_sizes if method.bits == 2 else by_size
        return in_blocks(values, method.chunk or len(values), code(method.density))
    raise AssertionError(method)


@dataclass
class Sender:
    """A rank that sends codes of one parameter's gradients."""

    method: Compression
    residual: Values | np.float32 = field(default_factory=lambda: np.float32(0))

    def send(self, gradient: Values) -> Values:
        decay = np.float32(getattr(self.method, "decay", 1))
        p = np.asarray(gradient + decay * self.residual, np.float32)
        sent = decoded(self.method, p)
        if self.method.error_feedback:
            self.residual = p - sent
        return sent


def mean_of(sent: list[Values]) -> Values:
    """The mean over the senders, added up in their order."""
    total = np.zeros_like(sent[0])
    for values in sent:
        total = total + values
    return np.asarray(total * np.float32(1 / len(sent)), np.float32)
