"""fully_shard: parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
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
from trireme._fsdp_join import FsdpJoinHook
from trireme._fsdp_params import collect
from trireme._fsdp_root import units_in
from trireme._fsdp_step_gate import watch_optimizers
from trireme._fsdp_unit import FsdpUnit
from trireme.rank_log import get_logger

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard


ModuleOrModules = TypeVar("ModuleOrModules", bound=nn.Module | list[nn.Module])


class UnshardHandle:
    """Of ``unshard(async_op=True)``. Nothing is in flight: parameters are where all ranks write
    them."""

    def wait(self) -> None:
        """Returns at once."""


class FSDPModule(TorchFSDPModule):
    """What ``fully_shard`` makes of a module: a subclass of torch's class of this name.

    Its methods have torch's names and arguments. Those that tune how torch gathers parameters are
    accepted where nothing has to be done here, and raise ``NotImplementedError`` where the user
    would get something else than what was asked for.
    """

    # [FSDP<Orig>, FSDPModule, torch's FSDPModule, Orig, ..., Joinable, ...]
    _orig_cls_mro_index = 3

    _trireme_unit: FsdpUnit
    _join_config = _JoinConfig.construct_disabled_join_config()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of a part of a container (``model[:1]``): the plain class."""
        plain = cls.__mro__[cls._orig_cls_mro_index]
        made = plain.__new__(plain, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def _get_fsdp_state(self) -> FsdpUnit:  # type: ignore[override]
        return self._trireme_unit

    def _units(self, recurse: bool) -> list[FsdpUnit]:
        return units_in(self) if recurse else [self._trireme_unit]  # type: ignore[arg-type]

    # parameters

    def unshard(self, async_op: bool = False) -> Any:
        """The module shows its unsharded parameters; not those of units in it.

        Waits until all ranks have written theirs. Reading them is fine, writing them is not.
        """
        self._trireme_unit.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """The module shows its sharded parameters; not those of units in it. No memory is freed:
        a host has the parameters once in any case."""
        self._trireme_unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward ends with ``reshard()``; else backward does."""
        if not isinstance(reshard_after_forward, bool):
            got = f"got {type(reshard_after_forward).__name__}, expected a bool"
            refuse(got, "Pass True or False.")
        for unit in self._units(recurse):
            if unit.group is not None:
                unit.group.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward ends with ``reshard()``."""
        for unit in self._units(recurse):
            if unit.group is not None:
                unit.group.reshard_after_backward = reshard_after_backward

    # gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards average gradients; without, they accumulate on this rank, unsharded
        and in ``reduce_dtype``, until one does."""
        for unit in self._units(recurse):
            unit.synchronizes = requires_gradient_sync
        if (root := self._trireme_unit.root) is not None:
            root.follow_flags()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """As in torch without HSDP: nothing changes."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing changes: every backward that averages gradients returns with final ones."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """With ``enabled`` backwards only accumulate, and ``finalize_backward()`` averages."""
        root = self._trireme_unit.own_root()
        if not self._trireme_unit.is_root:
            got = "got set_manual_backward_finalization() of an inner unit"
            refuse(got, "Call it on the outermost one.", kind=RuntimeError)
        if root.core is not None:
            root.core.set_manual_finalization(enabled)
        root.finalizes_manually = enabled

    def finalize_backward(self, *, async_op: bool = False) -> Any:
        """Averages what backwards have accumulated under manual finalization. Collective, unless
        ``set_requires_gradient_sync(False)`` holds."""
        root = self._trireme_unit.root
        if root is not None and root.core is not None:
            if not root.finalizes_manually:
                refuse(
                    "got finalize_backward() without manual finalization",
                    "Call set_manual_backward_finalization(True) before forward.",
                    kind=RuntimeError,
                )
            root.core.finalize_backward()
        return UnshardHandle() if async_op else None

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: what they have left, accumulated gradients
        included, is forgotten. On the outermost unit."""
        unit = self._trireme_unit
        if unit.root is not None and not unit.is_root:
            got = "got reset_iter_state() of an inner unit"
            refuse(got, "Call it on the outermost one.", kind=RuntimeError)
        if unit.root is not None and unit.root.core is not None:
            unit.root.core.reset()

    # what has nothing to do where nothing is gathered

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Accepted: there is nothing to fetch."""
        _check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Accepted: there is nothing to fetch."""
        _check_modules(modules)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Accepted: it is always kept, in the memory that all ranks share."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted: unsharding costs nothing."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: gradients are scaled before they are summed up in any case."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepted: a rank that does not use a parameter always contributes zeros."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accepted: gradients go through rings of a fixed size."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            got = f"got {type(max_input_buffers).__name__} as max_input_buffers"
            refuse(got, "Pass an int.", kind=TypeError)
        if max_input_buffers < 1:
            refuse(f"got max_input_buffers={max_input_buffers}", "Pass at least 1.")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        pass

    # what comes with the all-gather path

    def set_custom_all_gather(self, comm: Any) -> None:
        not_here("set_custom_all_gather()")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        not_here("set_custom_reduce_scatter()")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        not_here("set_all_reduce_hook()")

    def set_post_optim_event(self, event: Any) -> None:
        not_here("set_post_optim_event()")

    def set_gradient_divide_factor(self, factor: float) -> None:
        not_here("set_gradient_divide_factor()")

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        not_here("set_reduce_scatter_divide_factor()")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        not_here("set_separate_reduce_scatter_group()")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        not_here("set_allocate_memory_from_process_group_for_comm()")

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        not_here("set_symm_mem_for_comm()")

    # uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``Join([model], optimizer=optimizer)``, on the outermost unit.

        A rank that has joined takes part in the others' backwards with zeros, and steps its shards
        with ``optimizer``. ``divide_by_initial_world_size`` as for DDP. One more small all-reduce
        per forward.
        """
        optimizer = kwargs.get("optimizer")
        if optimizer is None:
            got = "got Join without the optimizer, which steps this rank's shards"
            refuse(got, "Pass it: Join([model], optimizer=optimizer).")
        return FsdpJoinHook(self, optimizer, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self._trireme_unit.mesh.get_group()

    # nn.Module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with memory of its own, sharded in the same way. Collective."""
        copy.deepcopy(self._trireme_unit, memo)
        if id(self) in memo:
            return memo[id(self)]
        made = object.__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        unit = self._trireme_unit
        unit.reshard()
        if unit.root is not None and unit.is_root:
            unit.root.begin_writing_anew()
        elif unit.root is not None:
            unit.root.begin_writing()
        return super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]

    def last_step(self) -> dict[str, float]:
        """Where the time of the last synchronized backward went; keys as in DDP's."""
        core = self._trireme_unit.own_root().core
        return {} if core is None else core.last_step()


def _check_modules(modules: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, TorchFSDPModule):
            refuse(f"got {type(module).__name__}, expected an FSDPModule", "Shard it first.")


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

    On ranks that share a host (backend ``trireme``) parameters lie once, in memory that all of
    them map, and a rank's shard is the slice that it owns: nothing is gathered. The first forward
    after a step waits until all ranks have stepped, and ``optimizer.step()`` waits until no rank
    reads. Gradients are reduced and scattered while backward runs; a rank that skips a parameter or
    a unit contributes zeros.

    What differs from torch: scalar parameters are accepted (every rank keeps and steps its own
    copy); so are ``Shard(dim)`` of any dimension with uneven sizes, and parameters that are not
    contiguous. Ranks keep the values of their own shards, as in torch: start from one seed, or
    load a state.

    Args:
        module: a module, or several that make one unit.
        mesh: 1-D, on CPU; all ranks if None.
        reshard_after_forward: whether the module shows its sharded parameters after forward, or
            only after backward. None is True, for the root too.
        shard_placement_fn: returns ``Shard(dim)`` or None (``Shard(0)``) for a parameter.
        mp_policy: torch's. ``reduce_dtype=None`` follows the installed torch: the parameter's dtype
            since 2.15, ``param_dtype`` before.
        offload_policy: ``CPUOffloadPolicy`` has nothing to do here, and says so.
        ignored_params: left alone.
        dp_mesh_dims: not yet.

    Raises:
        ValueError, TypeError: bad arguments; modules that differ between ranks (on all ranks).
        NotImplementedError: what the all-gather path will do (GPUs, several hosts, HSDP).
        torch.distributed.DistBackendError: the group failed.

    Collective. Cost: see ``csrc/strategies/fsdp/fsdp.h``.
    """
    check_module(module)
    mesh = resolve_mesh(mesh, dp_mesh_dims)
    reshard = resolve_reshard(reshard_after_forward, mesh.size())
    _check_offload(offload_policy)
    roots = _get_root_modules(list(module)) if isinstance(module, (list, tuple)) else [module]
    check_units(roots, lambda one: isinstance(one, TorchFSDPModule))
    managed = _managed_modules(roots)
    inner = [unit for root in roots for unit in units_in(root)]
    names = {one: name for root in roots for name, one in root.named_modules()}
    check_free(managed, inner, names)
    params = collect(managed, roots, ignored_params or set(), shard_placement_fn, mp_policy)
    unit = FsdpUnit(roots, params, mesh, mp_policy)
    if unit.group is not None:
        unit.group.reshard_after_forward = reshard
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


def _check_offload(policy: OffloadPolicy) -> None:
    if isinstance(policy, CPUOffloadPolicy):
        get_logger().info("[fully_shard] CPUOffloadPolicy: parameters are in CPU memory already")
    elif not isinstance(policy, OffloadPolicy):
        got = f"got {type(policy).__name__} as offload_policy"
        refuse(got, "Pass torch.distributed.fsdp.OffloadPolicy().", kind=TypeError)
