"""Writes to parameters that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from trireme._C import Zero
from trireme._core.announced_writes import before_writing
from trireme._core.errors import Area
from trireme._core.owners import ShardedOptimizer, optimizer_of, table_of


class _Writable(Protocol):
    """What is written between a begin and an end that ranks come to together."""

    def begin_writing(self) -> None: ...
    def end_writing(self) -> None: ...
    def abandon_step(self, reason: str) -> None: ...


_Place = tuple[nn.Module, str, nn.Parameter]
_begin_writing_shards: list[Callable[[nn.Module], None]] = []


def call_before_writing_shards(begin: Callable[[nn.Module], None]) -> None:
    """From now on ``begin`` is called with each module whose shards are to be written: it waits
    until no rank reads those that its strategy has made."""
    _begin_writing_shards.append(begin)


@contextmanager
def writing(target: nn.Module | ShardedOptimizer) -> Iterator[None]:
    """Inside, every rank may write the parameters of ``target``, all of them the same values.

    For what changes parameters outside of ``optimizer.step()``: loading a state, weight surgery,
    averaged weights swapped in and out::

        with trireme.writing(optimizer):
            model.load_state_dict(state)

    With the model as ``target`` what ``load_state_dict(assign=True)`` puts in place of its
    parameters is copied into them. An optimizer knows nothing of it otherwise, as in torch.

    Each rank writes a copy of its own meanwhile, of which the shards that it owns become
    everybody's at the end; an exception drops what was written on all ranks. Collective at the
    begin and at the end; nothing happens for parameters that no ZeroRedundancyOptimizer holds.

    Parameters that lie in a table of a parameter server (``trireme.ps``) are written at one clock
    of all workers; those of the first worker become everybody's. A table that only fills them
    raises ValueError.

    Under ``fully_shard`` every rank writes its own shards, in place, until its next forward or
    ``unshard()``. The begin waits until all ranks have come; nothing happens at the end.

    Raises:
        RuntimeError: a parameter was written outside before.
        ValueError: a parameter of another shape was assigned.
        torch.distributed.DistBackendError: another rank left it by an exception.
    """
    before_writing()
    places: list[_Place] = []
    cores: list[_Writable]
    if not isinstance(target, nn.Module):
        cores = list(target._cores)
    else:
        places = _places_in(target)
        for begin in _begin_writing_shards:
            begin(target)
        cores = [*_cores_at(places), *_tables_in(target)]
    begun: list[_Writable] = []
    with abandoning(begun):
        for core in cores:
            core.begin_writing()
            begun.append(core)
        yield
        for place in places:
            _put_back(*place)
        while begun:
            begun.pop(0).end_writing()


@contextmanager
def writing_shards(module: nn.Module) -> Iterator[None]:
    """Inside, each rank writes its shards of what the ranks share in ``module`` and reads nothing.

    In place, without the copies of ``writing``: for loading. Shards are those of ``fully_shard``
    and of ZeroRedundancyOptimizer. What an exception ends stays half written. Collective at the
    begin and at the end.

    Raises:
        RuntimeError: a parameter was written outside before.
        torch.distributed.DistBackendError: another rank left it by an exception.
    """
    before_writing()
    for begin in _begin_writing_shards:
        begin(module)
    cores = _cores_at(_places_in(module))
    for core in cores:
        core.begin_writing_shards()
    with abandoning(cores):
        yield
    for core in cores:
        core.end_writing_shards()


@contextmanager
def abandoning(cores: Sequence[_Writable]) -> Iterator[None]:
    """An exception that leaves this is what ranks raise with that wait for this one."""
    try:
        yield
    except BaseException as error:
        for core in cores:
            core.abandon_step(f"{type(error).__name__}: {error}")
        raise


def _places_in(module: nn.Module) -> list[_Place]:
    """Lists where parameters hang that an optimizer holds."""
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and optimizer_of(parameter) is not None
    ]


def sharding_optimizers(module: nn.Module) -> list[ShardedOptimizer]:
    """Lists those that hold parameters of ``module``."""
    return _optimizers_at(_places_in(module))


def _optimizers_at(places: Sequence[_Place]) -> list[ShardedOptimizer]:
    owners = (optimizer_of(parameter) for _, _, parameter in places)
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


def _cores_at(places: Sequence[_Place]) -> list[Zero]:
    return [core for optimizer in _optimizers_at(places) for core in optimizer._cores]


def _tables_in(module: nn.Module) -> list[_Writable]:
    """Lists the tables of parameter servers that keep parameters of ``module``; those that cannot
    be written refuse it."""
    tables = (table_of(parameter) for parameter in module.parameters())
    return [table.core for table in dict.fromkeys(tables) if table is not None]


def _put_back(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Gives ``parameter``, which its optimizer knows, the values of what was assigned instead."""
    assigned = owner._parameters.get(name)
    optimizer = optimizer_of(parameter)
    if assigned is None or assigned is parameter or optimizer is None:
        return
    if assigned.shape != parameter.shape:
        Area("zero").refuse(
            f"got '{name}' of shape {tuple(assigned.shape)} in place of one of shape "
            f"{tuple(parameter.shape)}",
            "Make the optimizer anew.",
            optimizer.process_group,
        )
    with torch.no_grad():
        parameter.copy_(assigned)
    owner._parameters[name] = parameter
