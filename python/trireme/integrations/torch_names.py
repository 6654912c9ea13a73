"""torch's classes replaced by Trireme's, for code that looks them up by their names."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

Places = Iterable[tuple[ModuleType, str, object]]

_PLACES = {
    "DistributedDataParallel": ("torch.nn.parallel", "torch.nn.parallel.distributed"),
    "fully_shard": (
        *("torch.distributed.fsdp", "torch.distributed._composable.fsdp"),
        "torch.distributed._composable.fsdp.fully_shard",
    ),
    "ZeroRedundancyOptimizer": (
        *("torch.distributed.optim", "torch.distributed.optim.zero_redundancy_optimizer"),
    ),
}

_lock = threading.Lock()
_inside = 0
"""How many blocks of ``in_place_of_torch`` have begun and not ended."""
_originals: list[tuple[ModuleType, str, object]] = []
_loaded_before: set[str] = set()


@contextmanager
def in_place_of_torch() -> Iterator[None]:
    """Lets code that runs inside find Trireme's classes under torch's names.

    Replaced are ``DistributedDataParallel`` in ``torch.nn.parallel``, ``fully_shard`` in
    ``torch.distributed.fsdp`` and ``ZeroRedundancyOptimizer`` in ``torch.distributed.optim``, for
    all threads of the process. A module that is imported inside keeps what it found. A module that
    did ``from torch.nn.parallel import DistributedDataParallel`` before keeps torch's class.
    Blocks may be nested, and begin and end in several threads; torch's names are back when the last
    one has ended, also by an exception.
    """
    ours = _our_classes()
    _enter(ours)
    try:
        yield
    finally:
        _leave(ours)


@contextmanager
def replaced(places: Places) -> Iterator[None]:
    """Gives names of modules other values inside of the block."""
    originals = _replace(places)
    try:
        yield
    finally:
        _replace(originals)


def _our_classes() -> dict[str, object]:
    # These modules name torch's classes, and so they are imported while the names mean those.
    from trireme import pipelining, ps, remote, save_checkpoint  # noqa: F401
    from trireme.ddp import DistributedDataParallel
    from trireme.fsdp import fully_shard
    from trireme.zero import ZeroRedundancyOptimizer

    found = (DistributedDataParallel, fully_shard, ZeroRedundancyOptimizer)
    return dict(zip(_PLACES, found, strict=True))


def _enter(ours: dict[str, object]) -> None:
    global _inside
    with _lock:
        if _inside == 0:
            places = [(module, name, ours[name]) for module, name in _torchs_places()]
            _loaded_before.update(sys.modules)
            _originals.extend(_replace(places))
        _inside += 1


def _leave(ours: dict[str, object]) -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            _replace(_originals)
            _correct_torch(ours)
            _originals.clear()
            _loaded_before.clear()


def _torchs_places() -> Iterator[tuple[ModuleType, str]]:
    for name, modules in _PLACES.items():
        for module in modules:
            try:
                found = import_module(module)
            except ModuleNotFoundError:  # a private name of torch, which may go
                continue
            if hasattr(found, name):
                yield found, name


def _replace(places: Places) -> list[tuple[ModuleType, str, object]]:
    """Returns what the places had before."""
    originals = []
    for module, name, value in places:
        originals.append((module, name, getattr(module, name)))
        setattr(module, name, value)
    return originals


def _correct_torch(ours: dict[str, object]) -> None:
    """Gives back to modules of torch that were imported meanwhile the classes that they mean.

    They ask whether a module is one of torch's, which ours are, too.
    """
    torchs = {id(ours[name]): original for _, name, original in _originals}
    for imported in set(sys.modules) - _loaded_before:
        if imported.startswith("torch."):
            table = vars(sys.modules[imported])
            for name, value in list(table.items()):
                if id(value) in torchs:
                    table[name] = torchs[id(value)]
    # torch notes in the class of this name which module computes; what it noted ends here.
    active = "_active_ddp_module"
    if active in vars(ours["DistributedDataParallel"]):
        delattr(ours["DistributedDataParallel"], active)
