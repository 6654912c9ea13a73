"""fully_shard: parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.utils import _get_root_modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trireme._C import check_same_compression
from trireme._core.compression import Compression, check_dense, checked, core_of, note_codes
from trireme._fsdp import refuse
from trireme._fsdp.checks import (
    check_free,
    check_kinds,
    check_module,
    check_policy,
    check_units,
    resolve_mesh,
    resolve_reshard,
)
from trireme._fsdp.module import FSDPModule
from trireme._fsdp.offload import choose, resolve_offload
from trireme._fsdp.own_names import OwnNames
from trireme._fsdp.params import collect
from trireme._fsdp.root import units_in
from trireme._fsdp.step_gate import watch_optimizers
from trireme._fsdp.unit import FsdpUnit, UnitCodes

ModuleOrModules = TypeVar("ModuleOrModules", bound=nn.Module | list[nn.Module])
_sharded_classes: dict[type, type] = {}


def _sharded_class(plain: type) -> type:
    """Returns what a module of class ``plain`` becomes: an FSDPModule, and a Joinable."""
    sharded = _sharded_classes.get(plain)
    if sharded is None:
        metaclass = type(plain)
        if metaclass is type:
            metaclass = ABCMeta  # torch's Joinable has this one
        elif not issubclass(metaclass, ABCMeta):
            metaclass = type(f"ABC{metaclass.__name__}", (metaclass, ABCMeta), {})
        sharded = metaclass(f"FSDP{plain.__name__}", (FSDPModule, plain, OwnNames), {})
        _sharded_classes[plain] = sharded
    return sharded


def fully_shard(
    module: ModuleOrModules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - as in torch
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: object = None,
    compression: Compression | None = None,
) -> ModuleOrModules:
    """Shards the parameters of ``module``, their gradients and, through them, the state of the
    optimizer; replaces ``torch.distributed.fsdp.fully_shard``.

    Called on inner modules first; each call makes a unit of the parameters that no inner unit has.
    Parameters become DTensors, of which the optimizer, made afterwards, steps this rank's part.

    On ranks that share a host (backend ``trireme``, parameters on CPU) parameters lie once, in
    memory that all of them map, and a rank's shard is the slice that it owns: nothing is gathered.
    The first forward after a step waits until all ranks have stepped, and ``optimizer.step()``
    waits until no rank reads. On several such hosts that forward brings to each of them what the
    others have written.

    Elsewhere (other backends, GPUs) units are gathered before they compute and freed afterwards,
    one ahead of the computation, in the order of the first forward. Later ones may have others,
    alike on all ranks: csrc/param/prefetch.h.

    Gradients are reduced and scattered while backward runs; a rank that skips a parameter or a unit
    contributes zeros.

    What differs from torch: scalar parameters are accepted (every rank keeps and steps its own
    copy); so are ``Shard(dim)`` of any dimension with uneven sizes, and parameters that are not
    contiguous. Ranks keep the values of their own shards, as in torch: start from one seed, or
    load a state.

    Buffers go to the device of the mesh, and so do the inputs of the outermost forward.

    Parameters that are DTensors already, by tensor parallelism, are sharded once more: see
    ``mesh``. Their modules show them unsharded as the DTensors that they were.

    Args:
        module: a module, or several that make one unit.
        mesh: 1-D (sharded), or 2-D (replicated, sharded; HSDP); all ranks if None. Beside tensor
            parallelism: the data parallel dimensions of the mesh that both are cut from. Units may
            have meshes of some of the ranks of the outermost one's (experts).
        reshard_after_forward: whether the module shows its sharded parameters after forward, and
            memory of gathered ones is freed, or only after backward. None is True, where units are
            gathered but for the outermost one, as in torch. A number, which divides that of the
            ranks: from forward until the backward that averages is over, so many neighbouring ranks
            have all parameters between them, and further gathers are among these only.
        shard_placement_fn: returns ``Shard(dim)`` or None (``Shard(0)``) for a parameter; or
            torch's ``ShardPlacementResult`` of these and another mesh, of some of the ranks, for
            this parameter (experts).
        mp_policy: torch's. ``reduce_dtype=None`` follows the installed torch: the parameter's dtype
            since 2.15, ``param_dtype`` before.
        offload_policy: ``trireme.Offload`` or torch's ``CPUOffloadPolicy``. On CPU they have
            nothing to do, and say so.
        ignored_params: left alone.
        dp_mesh_dims: torch's ``DataParallelMeshDims``: ``mesh`` is that of all dimensions, on which
            every parameter is a DTensor, Replicate along those that are named here. With
            ``replicate`` only every rank keeps all of its part, and steps it (DDP).
        compression: what gradients become on slow links, of ``trireme.compression``; themselves if
            None. Given to the outermost unit, for all units in it; the same on all ranks. On a 2-D
            mesh replicas compress what they send to each other, and nobody else does.

    Raises:
        ValueError, TypeError: bad arguments; modules that differ between ranks (on all ranks).
        AssertionError: a module that is sharded already; a Shard of no dimension (as in torch).
        NotImplementedError: dp_mesh_dims where torch has none; parameters that are sparse, or
            tensor subclasses.
        RuntimeError: pinned memory is refused; a scripted module.
        torch.distributed.DistBackendError: the group failed.

    Collective; of the first call for a process group that gathers also one new group of its ranks,
    and of the first one with each number as ``reshard_after_forward`` another one.
    Cost: see ``csrc/strategies/fsdp/fsdp.h``.
    """
    check_module(module)
    check_policy(mp_policy)
    method = checked(compression, refuse)
    resolved = resolve_mesh(mesh, dp_mesh_dims)
    check_same_compression(resolved.communicator, core_of(method))
    offload = resolve_offload(offload_policy, resolved.device)
    roots = _get_root_modules(list(module)) if isinstance(module, (list, tuple)) else [module]
    check_units(roots, lambda one: isinstance(one, TorchFSDPModule))
    classes = {root: _sharded_class(type(root)) for root in roots}
    managed = _managed_modules(roots)
    inner = [unit for root in roots for unit in units_in(root)]
    names = {module: name for root in roots for name, module in root.named_modules()}
    check_kinds(managed, roots, names)
    check_free(managed, inner, names)
    ignored = ignored_params or set()
    by_mesh = collect(managed, roots, ignored, shard_placement_fn, mp_policy, resolved)
    _move_buffers(managed, resolved.device)
    reshards = {
        mesh: resolve_reshard(reshard_after_forward, mesh.shard_communicator.world)
        for mesh in by_mesh
    }
    if method is not None:
        check_dense(roots)
    units: list[FsdpUnit] = []
    for own_mesh, params in reversed(by_mesh.items()):
        reshard, among = reshards[own_mesh]
        made = FsdpUnit(
            roots,
            params,
            own_mesh,
            mp_policy,
            reshards_among=among,
            offload=choose(
                offload, [param.original for param in params if param.original is not None]
            ),
            others=units if own_mesh is resolved else None,
            compression=method,
        )
        made.reshard_after_forward = reshard
        units = [made, *units]
    unit = units[0]
    for layer in managed:  # torch.compile asks for these
        layer._is_fsdp_managed_module = True  # type: ignore[assignment]
        layer._fsdp_use_orig_params = True  # type: ignore[assignment]
    for root in roots:
        root._trireme_unit = unit  # type: ignore[assignment]
        # Up to torch 2.14 pipelining asks torch's function for the state of a module.
        root.__dict__.setdefault(STATE_KEY, {})[torch_fully_shard.__wrapped__] = unit  # type: ignore[attr-defined]
        root.__class__ = classes[root]
        if method is not None:
            note_codes(root, UnitCodes(unit))
    watch_optimizers()
    return module


def _state(module: nn.Module) -> FsdpUnit | None:
    """Returns what a module was sharded into, as that of torch's function does."""
    return module.__dict__.get("_trireme_unit")


fully_shard.state = _state  # type: ignore[attr-defined]


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Brings them where the parameters go, as torch does; what is on the meta device has no values
    yet, and stays."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta or buffer.device == device:
                continue
            there = buffer.detach().to(device)
            is_wrapper = is_traceable_wrapper_subclass(buffer)
            if is_wrapper or not torch._has_compatible_shallow_copy_type(buffer, there):
                module._buffers[name] = there  # as Module.to() does
            else:
                buffer.data = there  # whoever else holds the buffer sees it moved


def _managed_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a unit: without those of inner units."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found or isinstance(module, TorchFSDPModule):
            return
        found[module] = None
        for child in module.children():
            visit(child)

    for root in roots:
        visit(root)
    return list(found)
