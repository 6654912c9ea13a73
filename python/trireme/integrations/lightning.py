"""Lightning's strategies with Trireme's classes.

Importing this module registers the strategies ``"trireme_ddp"`` and ``"trireme_fsdp"`` for the
Trainer and for Fabric, of those of the packages ``lightning``, ``pytorch_lightning`` and
``lightning_fabric`` that the program has imported; if it has imported none, of all that are
installed.

``DDPStrategy`` and ``FSDPStrategy`` are the Trainer's, ``FabricDDPStrategy`` and
``FabricFSDPStrategy`` those of Fabric, in the first of the packages. :func:`strategies` has those
of each.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from trireme.ddp import DistributedDataParallel
from trireme.integrations.tested_versions import say_if_untested
from trireme.integrations.units import AREA, is_sharded, shard_children, shard_units
from trireme.sync_batch_norm import convert_sync_batchnorm

Parallelize = Callable[[nn.Module, Any], nn.Module]


class Strategies(NamedTuple):
    """The strategies of one package."""

    ddp: type
    fsdp: type


_TRAINERS = ("lightning.pytorch", "pytorch_lightning")
_FABRICS = ("lightning.fabric", "lightning_fabric")
_PACKAGES = (*_TRAINERS, *_FABRICS)
_NAMES = {
    "DDPStrategy": (_TRAINERS, "ddp"),
    "FSDPStrategy": (_TRAINERS, "fsdp"),
    "FabricDDPStrategy": (_FABRICS, "ddp"),
    "FabricFSDPStrategy": (_FABRICS, "fsdp"),
}

if TYPE_CHECKING:
    DDPStrategy: Any
    FSDPStrategy: Any
    FabricDDPStrategy: Any
    FabricFSDPStrategy: Any

__all__ = [
    "DDPStrategy",
    "FSDPStrategy",
    "FabricDDPStrategy",
    "FabricFSDPStrategy",
    "register",
    "strategies",
]


class _OverTrireme:
    """The backend of a strategy: trireme, unless ``process_group_backend`` names another."""

    _process_group_backend: str | None
    root_device: torch.device

    def _get_process_group_backend(self) -> str:
        on_cpu = self.root_device.type == "cpu"
        return self._process_group_backend or ("trireme" if on_cpu else "cpu:trireme,cuda:nccl")


class _FabricDDP(_OverTrireme):
    """Fabric's DDPStrategy, with Trireme's DistributedDataParallel."""

    _ddp_kwargs: dict[str, Any]
    _determine_ddp_device_ids: Callable[[], list[int] | None]

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        return _wrap(module, self._determine_ddp_device_ids(), self._ddp_kwargs)


class _TrainerDDP(_OverTrireme):
    """The Trainer's DDPStrategy, with Trireme's DistributedDataParallel and SyncBatchNorm."""

    _ddp_kwargs: dict[str, Any]
    _layer_sync: Any
    determine_ddp_device_ids: Callable[[], list[int] | None]

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if _is_sync_batchnorm(self._layer_sync):
            model = convert_sync_batchnorm(model)
        return _wrap(model, self.determine_ddp_device_ids(), self._ddp_kwargs)


class _Sharded(_OverTrireme):
    """A ModelParallelStrategy whose ranks all share the data, unless told otherwise."""

    _data_parallel_size: Literal["auto"] | int
    _tensor_parallel_size: Literal["auto"] | int
    world_size: int

    def _setup_distributed(self) -> None:
        super()._setup_distributed()  # type: ignore[misc]
        if self._tensor_parallel_size == "auto":
            self._tensor_parallel_size = 1
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.world_size // self._tensor_parallel_size


class _FabricFSDP(_Sharded):
    """Fabric's ModelParallelStrategy, with Trireme's fully_shard.

    Without ``parallelize_fn`` every child of a ModuleList or Sequential is a unit.
    """

    def __init__(self, parallelize_fn: Parallelize | None = None, *sizes: Any, **options: Any):
        super().__init__(parallelize_fn or _shard_over_data, *sizes, **options)  # type: ignore[call-arg]


class _TrainerFSDP(_Sharded):
    """The Trainer's ModelParallelStrategy, with Trireme's fully_shard.

    A LightningModule whose ``configure_model`` shards nothing is given to ``parallelize_fn``, which
    changes it in place. Without that each of its children is sharded: every child of a ModuleList
    or Sequential in it is a unit.
    """

    lightning_module: Any
    device_mesh: Any
    _layer_sync: Any

    def __init__(self, parallelize_fn: Parallelize | None = None, *sizes: Any, **options: Any):
        super().__init__(*sizes, **options)
        self._parallelize_fn = parallelize_fn

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        # Lightning calls this hook where a model is to be sharded, and asks for it.
        self.lightning_module.configure_model = self._configure_model

    def teardown(self) -> None:
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("configure_model", None)
        super().teardown()  # type: ignore[misc]

    def _configure_model(self) -> None:
        module = self.lightning_module
        MethodType(type(module).configure_model, module)()
        if is_sharded(module):
            return
        if self._layer_sync:
            own = _is_sync_batchnorm(self._layer_sync)
            (convert_sync_batchnorm if own else self._layer_sync.apply)(module)
        if self._parallelize_fn is not None:
            self._parallelize_fn(module, self.device_mesh)
        else:
            shard_children(module, self.device_mesh["data_parallel"])


def strategies(package: str) -> Strategies:
    """Returns the classes for ``package``: ``lightning.pytorch``, ``lightning.fabric``,
    ``pytorch_lightning`` or ``lightning_fabric``."""
    if package not in _PACKAGES:
        got = f"got package={package!r}, expected one of {', '.join(_PACKAGES)}"
        AREA.refuse(got, "Pass the package from which the program takes Trainer or Fabric.")
    return _make_strategies(package)


def register() -> None:
    """Registers the strategies with packages that were imported since this module was."""
    for package in _packages():
        say_if_untested(package.partition(".")[0])
        there = import_module(f"{package}.strategies")
        name = "StrategyRegistry" if package in _TRAINERS else "STRATEGY_REGISTRY"
        registry, made = getattr(there, name), strategies(package)
        for kind, strategy in (("trireme_ddp", made.ddp), ("trireme_fsdp", made.fsdp)):
            registry.register(kind, strategy, description=strategy.__doc__, override=True)


def _packages() -> list[str]:
    imported = [package for package in _PACKAGES if package in sys.modules]
    if imported:
        return imported
    found = [package for package in _PACKAGES if find_spec(package.partition(".")[0])]
    if not found:
        got = (
            "got no installed package lightning, pytorch_lightning or lightning_fabric, "
            "expected one"
        )
        AREA.refuse(got, "Run: pip install lightning", kind=ImportError)
    return found


@functools.cache
def _make_strategies(package: str) -> Strategies:
    theirs = import_module(f"{package}.strategies")
    parts = (_TrainerDDP, _TrainerFSDP) if package in _TRAINERS else (_FabricDDP, _FabricFSDP)
    return Strategies(
        _derive("DDPStrategy", parts[0], theirs.DDPStrategy),
        _derive("FSDPStrategy", parts[1], theirs.ModelParallelStrategy),
    )


def _derive(name: str, part: type, theirs: type) -> type:
    made = type(name, (part, theirs), {"__module__": __name__, "__doc__": part.__doc__})
    # Fabric's has another name here, by which it is pickled where ranks are spawned.
    made.__qualname__ = name if part in (_TrainerDDP, _TrainerFSDP) else f"Fabric{name}"
    return made


def _wrap(
    module: nn.Module, device_ids: list[int] | None, options: dict[str, Any]
) -> DistributedDataParallel:
    # As Lightning does: what DDP makes must not be bound to the default stream.
    on_gpu = device_ids is not None
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
        return DistributedDataParallel(module, device_ids=device_ids, **options)


def _is_sync_batchnorm(layer_sync: Any) -> bool:
    """Says whether ``sync_batchnorm=True`` was given, which stands for torch's class."""
    return type(layer_sync).__name__ == "TorchSyncBatchNorm"


def _shard_over_data(model: nn.Module, mesh: Any) -> nn.Module:
    return shard_units(model, mesh["data_parallel"])


def __getattr__(name: str) -> Any:
    """Finds the classes of the first package that is in use."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kinds, which = _NAMES[name]
    for package in _packages():
        if package in kinds:
            return getattr(strategies(package), which)
    raise ImportError(f"{name} needs one of the packages {', '.join(kinds)}")


register()
