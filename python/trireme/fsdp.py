"""fully_shard: parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.utils import _get_root_modules

from trireme._fsdp_checks import (
    check_free,
    check_module,
    check_units,
    not_here,
    refuse,
    resolve_mesh,
    resolve_reshard,
)
from trireme._fsdp_module import FSDPModule as FSDPModule
from trireme._fsdp_params import collect
from trireme._fsdp_root import units_in
from trireme._fsdp_step_gate import watch_optimizers
from trireme._fsdp_unit import FsdpUnit
from trireme.rank_log import get_logger

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard


ModuleOrModules = TypeVar("ModuleOrModules", bound=nn.Module | list[nn.Module])
_sharded_classes: dict[type, type] = {}


def _swap_class(module: nn.Module) -> None:
    """``module`` becomes an FSDPModule, in place."""
    plain = type(module)
    sharded = _sharded_classes.get(plain)
    if sharded is None:
        sharded = type(f"FSDP{plain.__name__}", (FSDPModule, plain, Joinable), {})
        _sharded_classes[plain] = sharded
    module.__class__ = sharded


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
    one ahead of the computation, in the order of the first forward, which all ranks keep:
    csrc/param/prefetch.h.

    Gradients are reduced and scattered while backward runs; a rank that skips a parameter or a unit
    contributes zeros.

    What differs from torch: scalar parameters are accepted (every rank keeps and steps its own
    copy); so are ``Shard(dim)`` of any dimension with uneven sizes, and parameters that are not
    contiguous. Ranks keep the values of their own shards, as in torch: start from one seed, or
    load a state.

    Args:
        module: a module, or several that make one unit.
        mesh: 1-D (sharded), or 2-D (replicated, sharded; HSDP); all ranks if None.
        reshard_after_forward: whether the module shows its sharded parameters after forward, and
            memory of gathered ones is freed, or only after backward. None is True, where units are
            gathered but for the outermost one, as in torch.
        shard_placement_fn: returns ``Shard(dim)`` or None (``Shard(0)``) for a parameter.
        mp_policy: torch's. ``reduce_dtype=None`` follows the installed torch: the parameter's dtype
            since 2.15, ``param_dtype`` before.
        offload_policy: ``CPUOffloadPolicy`` has nothing to do on CPU, and says so.
        ignored_params: left alone.
        dp_mesh_dims: not yet.

    Raises:
        ValueError, TypeError: bad arguments; modules that differ between ranks (on all ranks).
        NotImplementedError: reshard_after_forward of a part of the ranks, dp_mesh_dims, parameters
            that are DTensors, offload from GPUs.
        torch.distributed.DistBackendError: the group failed.

    Collective; of the first call for a process group that gathers also one new group of its ranks.
    Cost: see ``csrc/strategies/fsdp/fsdp.h``.
    """
    check_module(module)
    resolved = resolve_mesh(mesh, dp_mesh_dims)
    reshard = resolve_reshard(reshard_after_forward, resolved.shard_communicator.world)
    _check_offload(offload_policy, resolved.device)
    roots = _get_root_modules(list(module)) if isinstance(module, (list, tuple)) else [module]
    check_units(roots, lambda one: isinstance(one, TorchFSDPModule))
    managed = _managed_modules(roots)
    inner = [unit for root in roots for unit in units_in(root)]
    names = {one: name for root in roots for name, one in root.named_modules()}
    check_free(managed, inner, names)
    ignored = ignored_params or set()
    params = collect(managed, roots, ignored, shard_placement_fn, mp_policy, resolved.device)
    unit = FsdpUnit(roots, params, resolved, mp_policy)
    unit.reshard_after_forward = reshard
    for one in managed:  # torch.compile asks for these
        one._is_fsdp_managed_module = True  # type: ignore[assignment]
        one._fsdp_use_orig_params = True  # type: ignore[assignment]
    for root in roots:
        root._trireme_unit = unit  # type: ignore[assignment]
        # Up to torch 2.14 pipelining asks torch's function for the state of a module.
        root.__dict__.setdefault(STATE_KEY, {})[torch_fully_shard.__wrapped__] = unit  # type: ignore[attr-defined]
        _swap_class(root)
    watch_optimizers()
    return module


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


def _check_offload(policy: OffloadPolicy, device: torch.device) -> None:
    if isinstance(policy, CPUOffloadPolicy) and device.type != "cpu":
        not_here(f"CPUOffloadPolicy on {device}")
    elif isinstance(policy, CPUOffloadPolicy):
        get_logger().info("[fully_shard] CPUOffloadPolicy: parameters are in CPU memory already")
    elif not isinstance(policy, OffloadPolicy):
        got = f"got {type(policy).__name__} as offload_policy"
        refuse(got, "Pass torch.distributed.fsdp.OffloadPolicy().", kind=TypeError)
