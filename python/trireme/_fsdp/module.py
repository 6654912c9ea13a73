"""The class that fully_shard gives to a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from trireme._fsdp import refuse
from trireme._fsdp.checks import check_outermost
from trireme._fsdp.comms import (
    check_comm,
    check_one_mesh,
    in_stream,
    symmetric_all_gather,
    use_all_gather,
)
from trireme._fsdp.root import units_in
from trireme._fsdp.unit import FsdpUnit

# torch has it since 2.15.
_ReductionHandle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)


class UnshardHandle(TorchUnshardHandle):
    """``unshard(async_op=True)`` returns it."""

    def __init__(self, unit: FsdpUnit | None = None) -> None:
        self._unit = unit
        self._uses = 0 if unit is None else unit.uses

    def wait(self) -> None:
        """Returns when the parameters are there, and the module shows them. Nothing happens if it
        has been used, or resharded, since."""
        unit, self._unit = self._unit, None
        if unit is None or unit.uses != self._uses:
            return
        for part in unit.all:
            part.unshard()


class _DoneReduction(_ReductionHandle):  # type: ignore[misc]
    """``finalize_backward(async_op=True)`` returns it, with final gradients."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class FSDPModule(TorchFSDPModule):
    """What ``fully_shard`` makes of a module: a subclass of torch's class of this name.

    Its methods have torch's names and arguments. Those that tune how torch gathers parameters are
    accepted where nothing has to be done here, and raise ``NotImplementedError`` where the user
    would get something else than what was asked for.
    """

    # [FSDP<Orig>, FSDPModule, torch's FSDPModule, Orig, ..., OwnNames, Joinable, ...]
    _orig_cls_mro_index = 3

    # Users' classes may look up the annotations of those that they are mixed with, in the module
    # that this one is shown in.
    if TYPE_CHECKING:
        _trireme_unit: FsdpUnit

        # What OwnNames has, which comes after the user's.
        set_dynamic_gather: Callable[[bool], None]
        last_step: Callable[[], dict[str, float]]
        join_hook: Callable[..., Any]
        join_device: torch.device
        join_process_group: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A part of a container (``model[:1]``) gets the plain class."""
        plain = cls.__mro__[cls._orig_cls_mro_index]
        made = plain.__new__(plain, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def _get_fsdp_state(self) -> FsdpUnit:  # type: ignore[override]
        return self._trireme_unit

    def _trireme_units(self, recurse: bool) -> list[FsdpUnit]:
        return units_in(self) if recurse else list(self._trireme_unit.all)  # type: ignore[arg-type]

    # parameters

    def unshard(self, async_op: bool = False) -> Any:
        """The module shows its unsharded parameters; not those of units in it.

        Waits until all ranks have written theirs, and gathers them, where ranks do not share
        memory; with ``async_op`` the handle that it returns waits for that. Then it is collective.
        Reading them is fine, writing them is not.
        """
        if async_op:
            for unit in self._trireme_units(recurse=False):
                unit.begin_unshard()
            return UnshardHandle(self._trireme_unit)
        for unit in self._trireme_units(recurse=False):
            unit.unshard()
        return None

    def reshard(self) -> None:
        """The module shows its sharded parameters; not those of units in it. Memory of the
        unsharded ones is freed, unless it is that of a host, which has them once in any case."""
        for unit in self._trireme_units(recurse=False):
            unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward ends with ``reshard()``, among all ranks; else backward does. All ranks
        pass the same."""
        if not isinstance(reshard_after_forward, bool):
            got = f"got {type(reshard_after_forward).__name__}, expected a bool"
            refuse(got, "Pass True or False.")
        for unit in self._trireme_units(recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward ends with ``reshard()``."""
        for unit in self._trireme_units(recurse):
            if unit.group is not None:
                unit.group.reshard_after_backward = reshard_after_backward

    # gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards average gradients; without, they accumulate on this rank, unsharded
        and in ``reduce_dtype``, until one does."""
        for unit in self._trireme_units(recurse):
            if unit.group is not None:
                unit.group.synchronizes = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Under HSDP: whether backwards sum gradients over the replicas; without, what the ranks
        with other shards have summed up waits on this rank, in ``reduce_dtype``, for one that does,
        and no ``.grad`` changes. All ranks pass the same. Nothing changes without HSDP, as in
        torch.
        """
        for unit in self._trireme_units(recurse):
            if unit.group is not None:
                unit.group.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing changes: every backward that averages gradients returns with final ones."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Backwards only accumulate if ``enabled``, and ``finalize_backward()`` averages."""
        root = self._trireme_unit.own_root()
        check_outermost(self._trireme_unit, "set_manual_backward_finalization")
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
        return _DoneReduction() if async_op else None

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: what they have left, accumulated gradients and
        what waits for the replicas included, is forgotten. On the outermost unit."""
        unit = self._trireme_unit
        check_outermost(unit, "reset_iter_state")
        if unit.root is not None and unit.root.core is not None:
            unit.root.core.reset()

    # in which order units are gathered; where none are, nothing changes

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """While this unit computes, those up to the last of ``modules`` are gathered, in the order
        in which the first forward came to them. Without this call it is the next one."""
        self._trireme_set_prefetch("set_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Does in backward what ``set_modules_to_forward_prefetch`` does in forward."""
        self._trireme_set_prefetch("set_backward_prefetch", modules)

    def _trireme_set_prefetch(self, setter: str, modules: Sequence[Any]) -> None:
        for module in modules:
            if not isinstance(module, FSDPModule):
                refuse(f"got {type(module).__name__}, expected an FSDPModule", "Shard it first.")
        for unit in self._trireme_units(recurse=False):
            unit.ahead[setter] = [module._trireme_unit for module in modules]
        if (root := self._trireme_unit.root) is not None:
            root.follow_gathers()

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
        """Gradients of this unit are divided by ``factor`` in place of the number of its ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            refuse(f"got factor={factor!r}, expected a number above 0", "Pass one.")
        for unit in self._trireme_units(recurse=False):
            if unit.group is not None:
                unit.group.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The earlier name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    # collectives of the user's

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None
    ) -> None:
        """``hook(row)`` may change this rank's part of the averaged gradients of this unit in
        place, after all is reduced (over replicas, too) and before it becomes ``.grad``, at the end
        of every backward that averages. All ranks pass the same hook, or None for nothing.

        ``row`` has one dimension, ``reduce_dtype``, and the parts of all parameters, as long on all
        ranks by zeros behind them. It is divided already: it holds what ``.grad`` gets, whatever
        the dtype (torch divides a part of fp16 later). Hooks are called on all ranks in one order
        while nothing of ours is on its way, so they may use any process group; they do not overlap
        with backward (csrc/strategies/fsdp/all_reduce_hooks.h). ``stream``: of the accelerator, to
        run it in.

        Raises:
            ValueError: a stream on a mesh of two dimensions, as in torch.
        """
        unit = self._trireme_unit
        check_one_mesh("set_all_reduce_hook", unit)
        if hook is not None and not callable(hook):
            got = f"got {type(hook).__name__} as all-reduce hook"
            refuse(got, "Pass a function of one tensor.", kind=TypeError)
        if stream is not None and unit.mesh.replicate_communicator is not None:
            refuse(
                "got a stream for the all-reduce hook on a mesh of 2 dimensions",
                "Leave it out: gradients are summed up over replicas before.",
            )
        if hook is not None and stream is not None:
            hook = in_stream(hook, stream, unit.mesh.device)
        unit.set_all_reduce_hook(hook)

    def set_custom_all_gather(self, comm: Any) -> None:
        """This unit is gathered by ``comm``, an ``AllGather`` of torch's; None: by ours.

        It is called as in torch, once per gather, with its input in its place in the output, the
        process group of gathers and ``async_op=True``, and may return a Work or None. What comes is
        copied out of the output, once more than ours would. Small agreements about the order of
        units, and ``reshard_after_forward=<int>``'s gathers among a part of the ranks, go without.

        Raises:
            ValueError: ranks share the memory of their host, so that nothing is gathered.
        """
        unit = self._trireme_unit
        check_comm("all_gather", comm, unit)
        unit.all_gather = comm
        use_all_gather(unit, unit.group)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Gradients are scattered by ``comm``, a ``ReduceScatter`` of torch's; None: by ours.

        Gradients of several units travel in one bucket, so all units under a root must get the same
        object, or the next forward raises ValueError. It is called once per bucket, with
        ``ReduceOp.SUM`` (gradients are divided before) and ``async_op=True``.

        Raises:
            ValueError: ranks share the memory of their host, where gradients go through rings.
        """
        unit = self._trireme_unit
        check_comm("reduce_scatter", comm, unit)
        unit.reduce_scatter = comm
        if unit.root is not None:
            unit.root.comms_changed = True

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Memory that is gathered into, and that gradients are sent from, is that of the process
        group's backend, where it has some, if ``enable`` is passed on any unit; else the log says
        once that it has none. Where nothing is gathered nothing changes.

        Raises:
            AssertionError: the unit has a custom collective, as in torch.
        """
        unit = self._trireme_unit
        if unit.all_gather is not None or unit.reduce_scatter is not None:
            got = "got memory of the process group for a unit with a custom collective"
            refuse(got, "Let its allocate() take it from there.", kind=AssertionError)
        unit.allocates_from_group = enable
        if unit.root is not None:
            unit.root.comms_changed = True

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        """This unit is gathered through torch's symmetric memory, for which NCCL has copies without
        kernels, or kernels of its own. What comes is copied out of it, as with a custom all-gather.
        All ranks call it at the same place; on CPU it was tested with a stand-in for NCCL only.

        Raises:
            ValueError: parameters are not on GPUs.
            AssertionError: the unit has a custom all-gather, as in torch.
            NotImplementedError: this torch has none.
        """
        unit = self._trireme_unit
        unit.all_gather = symmetric_all_gather(unit, backend)
        use_all_gather(unit, unit.group)

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
        self.reshard()
        if unit.root is not None and unit.is_root:
            unit.root.begin_writing_anew()
        elif unit.root is not None:
            unit.root.begin_writing()
        applied = super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for one in unit.all:
            one.note_as_owner()
        return applied
