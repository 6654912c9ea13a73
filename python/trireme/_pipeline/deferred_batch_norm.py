"""DeferredBatchNorm: micro-batches are normalized one by one, and tracked as the batch they are."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from trireme import _C
from trireme._pipeline import AREA, refuse


class DeferredBatchNorm(_BatchNorm):
    """Batch normalization whose running statistics are those of whole batches.

    In training each micro-batch is normalized by its own mean and variance, as ``BatchNorm1d``,
    ``2d`` and ``3d`` do. Running statistics wait until all micro-batches of a batch have come, and
    are then updated once with the mean and the variance of all their values: as one forward over
    the whole batch would do, ``momentum=None`` included. In evaluation it is BatchNorm. Names in
    ``state_dict`` are those of BatchNorm.

    In a :class:`trireme.Pipeline` a batch is what a step gets, and a step that fails changes
    nothing. Elsewhere it is what ``chunks`` forwards in training get. A forward that a checkpoint
    computes again in a backward counts once.

    Args:
        num_features: C of an input (N, C) or (N, C, ...).
        eps, momentum, affine, track_running_stats, device, dtype: as in ``nn.BatchNorm2d``.
        chunks: How many micro-batches are a batch.

    Raises:
        ValueError: from ``forward``: an input without channels, or with 1 value per channel in
            training.
    """

    _kind: type[_BatchNorm] | None = None  # what it was converted from, which knows its inputs

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
        *,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self._take_chunks(chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """See :func:`convert_deferred_batch_norm`: torchgpipe has it here."""
        return convert_deferred_batch_norm(module, chunks)

    def _take_chunks(self, chunks: int) -> None:
        _expect_chunks(chunks)
        self.chunks = chunks
        self._in_step = False
        self._forget()

    def _forget(self) -> None:
        self._forwards = 0
        self._count = 0
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None  # sums differences from the mean, squared

    def begin_batch(self) -> None:
        """Begins a batch that ends with :meth:`end_batch`, however many forwards it has."""
        self._forget()
        self._in_step = True

    def end_batch(self, has_failed: bool = False) -> None:
        """Updates running statistics with what came since, or drops that."""
        self._in_step = False
        if not has_failed and self._count > 0:
            self._update()
        self._forget()

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input``. See the class."""
        self._check_input_dim(input)
        running_mean, running_var = self.running_mean, self.running_var
        if not self.training or not self.track_running_stats or running_mean is None:
            running = (None, None) if self.training else (running_mean, running_var)
            trains = self.training or running_mean is None
            return functional.batch_norm(
                input, *running, self.weight, self.bias, trains, 0.0, self.eps
            )
        # With momentum 1 it leaves mean and variance of the input there.
        mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_mean)
        output = functional.batch_norm(
            input, mean, var, self.weight, self.bias, True, 1.0, self.eps
        )
        if torch._C._current_graph_task_id() == -1 and not _C.is_recomputing():
            self._gather(input.numel() // input.size(1), mean, var)
            self._forwards += 1
            if not self._in_step and self._forwards >= self.chunks:
                self.end_batch()
        return output

    @torch.no_grad()
    def _gather(self, count: int, mean: Tensor, var: Tensor) -> None:
        dtype = torch.float64 if mean.dtype == torch.float64 else torch.float32
        mean, squares = mean.to(dtype), var.to(dtype) * (count - 1)
        if self._mean is None or self._squares is None:
            self._count, self._mean, self._squares = count, mean, squares
            return
        total = self._count + count
        apart = mean - self._mean
        # Not in place: autograd keeps the mean that the forward was given.
        self._squares = self._squares + squares + apart.square() * (self._count * count / total)
        self._mean = self._mean + apart * (count / total)
        self._count = total

    @torch.no_grad()
    def _update(self) -> None:
        assert self._mean is not None and self._squares is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        var = self._squares / max(self._count - 1, 1)
        for running, found in ((self.running_mean, self._mean), (self.running_var, var)):
            assert running is not None
            running.copy_(running.to(found.dtype).lerp_(found, momentum or 0.0))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.size(1) == 0:
            what = "in a batch norm, expected dimensions for batch and channels"
            got = f"got an input of shape {list(input.shape)} {what}"
            refuse(got, "Give it both.")
        if self._kind is not None:
            self._kind._check_input_dim(self, input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunks={self.chunks}"  # type: ignore[no-untyped-call]


def _expect_chunks(chunks: object) -> None:
    AREA.expect("chunks", chunks, int, "a whole number", next_step="Pass a number.")
    if isinstance(chunks, int) and chunks < 1:
        refuse(f"got chunks={chunks}, expected 1 or more", "Pass the number of micro-batches.")


def convert_deferred_batch_norm(module: nn.Module, chunks: int = 1) -> nn.Module:
    """Replaces every ``BatchNorm1d``, ``2d`` and ``3d`` in ``module`` by a DeferredBatchNorm.

    Parameters, buffers, hooks and mode go over as they are, so an optimizer made before keeps
    working; a layer used in several places stays one layer. Those without running statistics stay
    what they are. A DeferredBatchNorm with other ``chunks`` makes way for one with these.

    Args:
        module: Changed in place. If it is a BatchNorm itself, the result is a layer in its stead.
        chunks: How many micro-batches are a batch. In a :class:`trireme.Pipeline` a step is one.

    Returns:
        ``module``, or what stands in its stead.

    Raises:
        TypeError: ``module`` is no module, or ``chunks`` no number.
        ValueError: ``chunks`` below 1; a SyncBatchNorm, a lazy layer, or a BatchNorm with a forward
            of its own.
    """
    AREA.expect_module(module)
    _expect_chunks(chunks)
    refuse_batch_norms(module)
    return _convert(module, chunks, {})


def refuse_batch_norms(module: nn.Module, name: str = "") -> None:
    """Refuses what :func:`convert_deferred_batch_norm` cannot replace."""
    for inner, layer in module.named_modules(prefix=name):
        if not isinstance(layer, _BatchNorm) or isinstance(layer, DeferredBatchNorm):
            continue
        got = f"got a {type(layer).__name__} as '{inner}' to be deferred"
        if isinstance(layer, nn.SyncBatchNorm):
            refuse(f"{got}, expected BatchNorm1d, 2d or 3d", "Replace it, or do not defer.")
        if isinstance(layer, LazyModuleMixin):
            refuse(f"{got}, expected it to know its features", "Run one forward before.")
        if type(layer).forward is not _BatchNorm.forward:
            refuse(f"{got}, expected the forward of BatchNorm", "Replace it, or do not defer.")


def _convert(module: nn.Module, chunks: int, converted: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in converted:
        return converted[module]
    result = converted[module] = _in_stead_of(module, chunks)
    for name, child in list(result._modules.items()):
        if child is not None:
            result._modules[name] = _convert(child, chunks, converted)
    return result


def _in_stead_of(module: nn.Module, chunks: int) -> nn.Module:
    if not isinstance(module, _BatchNorm) or not module.track_running_stats:
        return module
    was_deferred = isinstance(module, DeferredBatchNorm)
    if was_deferred and module.chunks == chunks:
        return module
    layer = DeferredBatchNorm.__new__(DeferredBatchNorm)
    layer.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        layer.__dict__[table] = copy.copy(module.__dict__[table])
    if not was_deferred:
        layer._kind = type(module)
    layer._take_chunks(chunks)
    return layer


def defer(
    layers: dict[str, nn.Module], names: Sequence[str], chunks: int | None
) -> list[DeferredBatchNorm]:
    """Converts these layers, unless ``chunks`` is None; returns what is deferred in them."""
    kept = nn.ModuleList([layers[name] for name in names])
    if chunks is not None:  # together: a layer that several of them have stays one layer
        convert_deferred_batch_norm(kept, chunks)
        layers.update(zip(names, kept, strict=True))
    return [module for module in kept.modules() if isinstance(module, DeferredBatchNorm)]


@contextmanager
def whole_batch(layers: Iterable[DeferredBatchNorm]) -> Iterator[None]:
    """Makes what these layers see one batch; an exception leaves their statistics as they were."""
    for layer in layers:
        layer.begin_batch()
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        for layer in layers:
            layer.end_batch(has_failed)
