"""Parts of the loss that layers of any stage have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from trireme import _C
from trireme._C import LossCollector


def pipeline_loss(value: Tensor, weight: float = 1.0) -> None:
    """Adds ``weight`` times ``value`` to the loss of the micro-batch that runs.

    A layer of any stage calls it in its forward, such as one that balances experts. Its gradients
    flow with those of the loss, and the sum of all parts is in what :meth:`Pipeline.step` returns.
    Outside of a pipeline, and where a pipeline in one process is called, :func:`collect_losses` has
    it. A recomputation in a backward does not count again.

    Args:
        value: A tensor of one real number.
        weight: What it is multiplied by.

    Raises:
        ValueError: ``value`` is no real number; or gradients are enabled, and neither a step of a
            pipeline runs nor :func:`collect_losses`, so that this part would be lost.
    """
    _C.pipeline_loss(value, weight)


class CollectedLosses:
    """Parts of a loss, in the order in which layers had them."""

    def __init__(self, collector: LossCollector) -> None:
        self._collector = collector

    def parts(self) -> list[tuple[Tensor, float]]:
        """Each with its weight."""
        return self._collector.losses()

    def total(self) -> Tensor | float:
        """Returns their weighted sum, with a graph; 0.0 if there are none."""
        weighted = [value.reshape(()) * weight for value, weight in self.parts()]
        return sum(weighted[1:], weighted[0]) if weighted else 0.0


@contextmanager
def collect_losses() -> Iterator[CollectedLosses]:
    """Has what layers give to :func:`pipeline_loss` where no step of a pipeline runs them::

        with trireme.collect_losses() as losses:
            loss = loss_fn(module(x), y)
        (loss + losses.total()).backward()

    The module may be a pipeline in one process. Then there are the parts of each micro-batch, in
    the order of micro-batches, and their weights are divided by the number of these; with
    ``scale_grads=False`` they are not.
    """
    collector = LossCollector()
    collector.begin()
    try:
        yield CollectedLosses(collector)
    finally:
        collector.end()
