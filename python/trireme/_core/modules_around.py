"""The modules in which parameters hang, and what these call them, found from the parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from trireme._core.plain_model import plain_model


class ModulesAround:
    """The modules of this process that hold some of ``parameters``.

    A parameter does not know its module, so they are looked for among all objects that Python's
    garbage collector tracks; this costs a look at each. A module that is made later, or that
    ``gc.freeze()`` hides, is not found.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._wanted = {id(parameter): parameter for parameter in parameters}
        is_module = _KindsOfModules()
        found = [thing for thing in gc.get_objects() if is_module[type(thing)]]
        inner = {id(child) for holder in found for _, child in _members(holder, "_modules")}
        self._outermost = [holder for holder in found if id(holder) not in inner]
        self.holders: list[nn.Module] = [
            holder
            for holder in found
            if any(id(member) in self._wanted for _, member in _members(holder, "_parameters"))
        ]
        """Those that have such a parameter as a member."""

    def names(self) -> dict[torch.Tensor, str]:
        """Tells what the outermost modules call the parameters; nothing of those that hang nowhere.

        Where several outermost modules hold a parameter, that one names it which holds most of all.
        The wrappers of DistributedDataParallel and torch.compile add nothing to a name.
        """
        found = [self._names_in(plain_model(holder)) for holder in self._outermost]
        named: dict[torch.Tensor, str] = {}
        for names in sorted(found, key=lambda names: (-len(names), sorted(names.values()))):
            taken = set(named.values())
            for number, name in names.items():
                if name not in taken:  # two networks may have the same names
                    named.setdefault(self._wanted[number], name)
        return named

    def _names_in(self, module: nn.Module) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, parameter in _walk(module, "", set()):
            if id(parameter) in self._wanted:
                names.setdefault(id(parameter), name)
        return names


class _KindsOfModules(dict[type, bool]):
    """Says whether a type is a module's: isinstance() would ask the object, and a proxy asks on."""

    def __missing__(self, kind: type) -> bool:
        return self.setdefault(kind, nn.Module in kind.__mro__)


def _members(module: nn.Module, kind: str) -> list[tuple[str, object]]:
    """Its parameters or its modules, also where its constructor has not run, or TorchScript has
    put something else there."""
    members = module.__dict__.get(kind)
    return list(members.items()) if isinstance(members, dict) else []


def _walk(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, parameter in _members(module, "_parameters"):
        yield prefix + name, parameter
    for name, child in _members(module, "_modules"):
        if isinstance(child, nn.Module):
            yield from _walk(child, f"{prefix}{name}.", seen)
