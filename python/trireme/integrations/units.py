"""Which modules of a model become units of fully_shard, where nobody says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from trireme._core.errors import Area
from trireme.fsdp import FSDPModule, fully_shard

AREA = Area("integrations")
_HAVE_NO_FORWARD = (nn.ModuleList, nn.ModuleDict)
_ONLY_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_SHARD_YOURSELF = (
    "Call trireme.fully_shard in configure_model(), or in a function that you pass as "
    "parallelize_fn."
)


def is_sharded(model: nn.Module) -> bool:
    """Says whether a part of the model is a unit already, of Trireme's or torch's function."""
    from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

    return any(isinstance(module, FSDPModule | TorchFSDPModule) for module in model.modules())


def shard_units(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    """Shards every child of a ModuleList or Sequential, and then the model.

    A child whose parameters a module outside of it has, too, goes with the model. ``options`` are
    further arguments of ``fully_shard``.
    """
    for unit in units_in(model):
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def shard_children(model: nn.Module, mesh: Any = None) -> None:
    """The same for each child of a model whose own forward nobody calls.

    Raises:
        ValueError: a parameter is in none of the children, or in two.
    """
    roots = dict(_roots_in(model, ""))
    _check_shared(roots)
    for root in roots.values():
        shard_units(root, mesh)


def units_in(model: nn.Module) -> list[nn.Module]:
    """Returns them, inner ones first."""
    uses = _uses_of_parameters(model)
    containers = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
    found: dict[nn.Module, None] = {}
    for container in reversed(containers):
        for child in container.children():
            if child is not model and _can_be_unit(child, uses) and _has_own(child, found):
                found.setdefault(child)
    return list(found)


def _can_be_unit(module: nn.Module, uses: Counter[int]) -> bool:
    if isinstance(module, (*_HAVE_NO_FORWARD, *_ONLY_PARAMETERS)) or is_sharded(module):
        return False
    own = _uses_of_parameters(module)
    return all(uses[parameter] == count for parameter, count in own.items())


def _has_own(module: nn.Module, units: dict[nn.Module, None]) -> bool:
    taken = {id(parameter) for unit in units for parameter in unit.parameters()}
    return any(id(parameter) not in taken for parameter in module.parameters())


def _uses_of_parameters(model: nn.Module) -> Counter[int]:
    return Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )


def _roots_in(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, parameter in model._parameters.items():
        if parameter is not None:
            got = f"got parameter {prefix}{name}, which is in no module that has a forward, "
            _refuse(got + "expected each in one child of the model")
    for name, child in model.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, (*_HAVE_NO_FORWARD, *_ONLY_PARAMETERS)):
            yield from _roots_in(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _check_shared(roots: dict[str, nn.Module]) -> None:
    owners: dict[int, str] = {}
    for name, root in roots.items():
        for inner, parameter in root.named_parameters():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                got = f"got parameter {name}.{inner}, which is also in {other}, "
                _refuse(got + "expected each in one child of the model")


def _refuse(got: str) -> None:
    AREA.refuse(got, _SHARD_YOURSELF)
