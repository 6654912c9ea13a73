"""Writes to parameters that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from trireme._parameter_owners import optimizer_of
from trireme.zero import ZeroRedundancyOptimizer


@contextmanager
def writing(target: nn.Module | ZeroRedundancyOptimizer) -> Iterator[None]:
    """Inside, every rank may write the parameters of ``target`` in place, all the same values.

    For what changes parameters outside of ``optimizer.step()``: loading a state, weight surgery,
    averaged weights swapped in and out::

        with trireme.writing(optimizer):
            model.load_state_dict(state)

    Waits at the begin until no rank reads them, at the end until all have written. Collective;
    nothing happens for parameters that no ZeroRedundancyOptimizer holds.

    Raises:
        RuntimeError: a parameter was written outside before.
        torch.distributed.DistBackendError: another rank left it by an exception.
    """
    if isinstance(target, ZeroRedundancyOptimizer):
        optimizers = [target]
    else:
        owners = (optimizer_of(parameter) for parameter in target.parameters())
        optimizers = list(dict.fromkeys(owner for owner in owners if owner is not None))
    cores = [core for optimizer in optimizers for core in optimizer._cores]
    for core in cores:
        core.begin_writing()
    try:
        yield
    except BaseException as error:
        for core in cores:
            core.abandon_step(f"{type(error).__name__}: {error}")
        raise
    for core in cores:
        core.end_writing()
