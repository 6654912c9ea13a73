"""The class that fully_shard gives to a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook, _JoinConfig
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from trireme._fsdp_checks import not_here, refuse
from trireme._fsdp_join import FsdpJoinHook
from trireme._fsdp_root import units_in
from trireme._fsdp_unit import FsdpUnit


class UnshardHandle:
    """Of ``unshard(async_op=True)``."""

    def __init__(self, unit: FsdpUnit | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Returns when the parameters are there, and the module shows them."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.unshard()


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

        Waits until all ranks have written theirs, and gathers them, where ranks do not share
        memory; with ``async_op`` the handle that it returns waits for that. Then it is collective.
        Reading them is fine, writing them is not.
        """
        if async_op:
            self._trireme_unit.begin_unshard()
            return UnshardHandle(self._trireme_unit)
        self._trireme_unit.unshard()
        return None

    def reshard(self) -> None:
        """The module shows its sharded parameters; not those of units in it. Memory of the
        unsharded ones is freed, unless it is that of a host, which has them once in any case."""
        self._trireme_unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward ends with ``reshard()``; else backward does."""
        if not isinstance(reshard_after_forward, bool):
            got = f"got {type(reshard_after_forward).__name__}, expected a bool"
            refuse(got, "Pass True or False.")
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.settle_reshard(is_root=unit.is_root)

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
        """Without HSDP nothing changes, as in torch."""
        if not requires_all_reduce and self._trireme_unit.mesh.replicate_communicator is not None:
            not_here("set_requires_all_reduce(False) on a mesh of 2 dimensions")

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

    # in which order units are gathered; where none are, nothing changes

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """While this unit computes, those up to the last of ``modules`` are gathered, in the order
        in which the first forward came to them. Without this call it is the next one."""
        self._set_prefetch("set_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """The same in backward."""
        self._set_prefetch("set_backward_prefetch", modules)

    def _set_prefetch(self, setter: str, modules: Sequence[Any]) -> None:
        for module in modules:
            if not isinstance(module, FSDPModule):
                refuse(f"got {type(module).__name__}, expected an FSDPModule", "Shard it first.")
        self._trireme_unit.ahead[setter] = [module._trireme_unit for module in modules]
        if (root := self._trireme_unit.root) is not None:
            root.follow_gathers()

    def set_dynamic_gather(self, dynamic: bool) -> None:
        """On the outermost unit, the same on all ranks: with ``dynamic`` ranks may use units in
        another order, or more often, in every forward. Costs one small collective per unit and
        pass; without, the first forward of all ranks sets the order (csrc/param/prefetch.h)."""
        unit = self._trireme_unit
        if unit.root is not None and not unit.is_root:
            got = "got set_dynamic_gather() of an inner unit"
            refuse(got, "Call it on the outermost one.", kind=RuntimeError)
        unit.gathers_dynamically = dynamic
        if unit.root is not None:
            unit.root.follow_gathers()

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

    def set_post_optim_event(self, event: torch.Event) -> None:
        """On the outermost unit: the next forward's gathers begin after ``event``. They begin after
        what was enqueued in their stream in any case."""
        self._trireme_unit.post_optim_event = event

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accepted: what is gathered always has a process group of its own."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients of this unit are divided by ``factor`` in place of the number of ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            refuse(f"got factor={factor!r}, expected a number above 0", "Pass one.")
        self._trireme_unit.divide_factor = float(factor)
        if (root := self._trireme_unit.root) is not None:
            root.follow_flags()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The same, by its earlier name."""
        self.set_gradient_divide_factor(factor)

    # what is not here

    def set_custom_all_gather(self, comm: Any) -> None:
        not_here("set_custom_all_gather()")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        not_here("set_custom_reduce_scatter()")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        not_here("set_all_reduce_hook()")

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
        return self._trireme_unit.mesh.device

    @property
    def join_process_group(self) -> Any:
        return self._trireme_unit.mesh.group

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
