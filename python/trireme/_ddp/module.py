"""DistributedDataParallel: torch's class, with Trireme's C++ core underneath."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from trireme import _C
from trireme._core.compression import Compression, core_of, note_codes
from trireme._core.find_tensors import find_tensors
from trireme._core.group_communicator import communicator_of
from trireme._core.joined_steps import check_joined_batch_norms
from trireme._core.layer_watch import LayerWatch
from trireme._core.owners import note_averaging
from trireme._ddp import AREA
from trireme._ddp.checks import (
    check_batch_norms,
    check_bucket_caps,
    check_comm_hook,
    check_compression,
    check_delayed,
    check_device_ids,
    check_materialized,
    resolve_process_group,
    returning_future,
)
from trireme._ddp.in_backward import step_in_backward
from trireme._ddp.join import DdpJoinHook
from trireme._ddp.mixed_precision import MixedPrecisionForward
from trireme._ddp.nesting import check_nested, lead, leader_of, torch_averages
from trireme._ddp.reducer import Reducer
from trireme._ddp.tensors import ModuleTensors, watching
from trireme._ddp.torch_names import TorchNames

_MIB = 1024 * 1024
_DEFAULT_CAP_MB = 25


class _Here(threading.local):
    """What runs in this thread: whether a forward is inside of another one is a question of one
    thread, as others may evaluate meanwhile."""

    def __init__(self) -> None:
        self.depths: WeakKeyDictionary[TorchNames, int] = WeakKeyDictionary()
        # What torch had noted as running when each forward of this thread began, the inmost last.
        self.around: list[TorchDDP | None] = []

    def depth_of(self, ddp: TorchNames) -> int:
        return self.depths.get(ddp, 0)

    def enter(self, ddp: TorchNames) -> None:
        """Notes what is around ``ddp``. torch has one note for all threads, so one of ours that
        does not run in this thread is another thread's."""
        around = TorchDDP._get_active_ddp_module()
        is_others = isinstance(around, TorchNames) and not self.depth_of(around)
        self.around.append(None if is_others else around)
        self.depths[ddp] = self.depth_of(ddp) + 1

    def leave(self, ddp: TorchNames) -> None:
        """Restores what was around, as torch forgets it (2.11) or has noted another thread's."""
        self.depths[ddp] -= 1
        TorchDDP._active_ddp_module = self.around.pop()


_here = _Here()


class DistributedDataParallel(TorchNames):
    """Synchronous data parallelism; replaces ``torch.nn.parallel.DistributedDataParallel``.

    Each rank holds the whole module and sees its own part of the batch; when ``backward()``
    returns, every ``.grad`` is the average over the ranks. Signature, attributes and
    ``state_dict`` names are those of torch 2.15's class, of which this is a subclass
    (``isinstance`` holds), on every supported torch.

    What differs, for the better:

    * ``find_unused_parameters``, ``static_graph``, ``skip_all_reduce_unused_params``,
      ``batched_grad_copy``, ``lazy_bucket_allocation`` and the ``delay_all_reduce`` pair are
      accepted and unneeded: unused parameters, layers checkpointed several times and parameters
      frozen or unfrozen in mid-run are found without a walk over the graph and without being told.
    * A backward synchronizes because it reaches an output of a synchronized forward, so pipelines
      (1F1B), several forwards per backward and several backwards per forward are right.
    * After ``zero_grad(set_to_none=True)`` gradients are ranges of the buckets that were reduced:
      no copy, no second buffer. They are ordinary tensors for autograd, but share storage with
      their neighbours; a gradient that you keep is never overwritten. A ``.grad`` that existed
      before backward keeps its identity, unless ``gradient_as_bucket_view=True``.
    * When a rank fails in the middle of a backward, the others raise from theirs, naming it.

    Args:
        module: has at least one trainable parameter; all of them on one kind of device.
        device_ids, output_device, dim: as in torch; None on CPU.
        broadcast_buffers, forward_sync_buffers: broadcast rank 0's buffers before each forward
            (default True). ``broadcast_buffers=False`` also leaves them alone at construction.
        init_sync: compare the parameter lists of all ranks, then start from rank 0's values.
        process_group: of torch.distributed; the default group if None.
        bucket_cap_mb: MiB per bucket (default 25, the first 1). ``bucket_cap_mb_list``: one per
            bucket.
        mixed_precision: torch's ``_MixedPrecision``; needs no CUDA stream, works on CPU.
        device_mesh: a 1-D mesh in place of ``process_group``.
        compression: what gradients become on slow links, of ``trireme.compression``; themselves if
            None. The same on all ranks.

    Raises:
        ValueError, TypeError: bad arguments.
        RuntimeError: as torch's class: no parameter to train, lazy or meta ones, both a group and
            a mesh, parameters that differ between ranks (on all ranks alike).
        torch.distributed.DistBackendError: out of ``backward()`` or ``forward()``, when the group
            failed.

    Cost per synchronized step: all gradient bytes once through an all-reduce, 4 bytes per
    parameter for the map of used parameters, buffers once. Memory: one gradient size for buckets
    and gradients together.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        compression: Compression | None = None,
    ) -> None:
        # torch's __init__ would build a c10d::Reducer beside ours.
        nn.Module.__init__(self)
        Joinable.__init__(self)
        group = resolve_process_group(process_group, device_mesh, module)
        check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, group)
        check_bucket_caps(bucket_cap_mb, bucket_cap_mb_list, group)
        if check_reduction:
            warnings.warn("check_reduction has no effect", FutureWarning, stacklevel=2)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.process_group = group
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        check_materialized(module, self.parameters_to_ignore, group)
        check_batch_norms(module, group)
        self._module_parameters = [
            p for n, p in module.named_parameters() if n not in self.parameters_to_ignore
        ]
        devices = {p.device for p in self._module_parameters}
        self.is_multi_device_module = len(devices) > 1
        self.device = next(iter(devices), torch.device("cpu"))
        self.device_type = self.device.type
        self.device_ids, self.output_device = check_device_ids(
            device_ids, output_device, devices, group
        )

        self.module = module
        self.dim = dim
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        self.compression = check_compression(compression, group)
        check_nested(module, group, self.compression)
        if forward_sync_buffers is None:
            forward_sync_buffers = init_sync_buffers = broadcast_buffers is not False
        else:
            init_sync_buffers = True
        self.forward_sync_buffers = forward_sync_buffers
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * _MIB
        self.bucket_bytes_cap = int(
            (_DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * _MIB
        )
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.bucket_bytes_cap_list = [int(cap * _MIB) for cap in bucket_cap_mb_list or ()]
        self.use_side_stream_for_tensor_copies = self.device_type == "cuda"
        self._use_python_reducer = False
        self._delay_all_reduce_params: list[nn.Parameter] = []
        self._delay_all_reduce_all_params = False
        self._ddp_sink_clone = False
        self._lazy_init_ran = False
        self._require_manual_backward_finalization = False
        self._divide_by_initial_world_size = True
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._mixed_forward = MixedPrecisionForward.make(
            mixed_precision, module, self.parameters_to_ignore
        )
        self._build_core(init_sync=init_sync, init_sync_buffers=init_sync_buffers)

    def _build_core(self, *, init_sync: bool, init_sync_buffers: bool) -> None:
        """Builds the C++ side for the module as it is now."""
        options = _C.DdpOptions()
        options.init_sync = init_sync
        options.init_sync_buffers = init_sync_buffers
        if self.bucket_bytes_cap_list:
            options.bucket_cap_mb_list = [cap / _MIB for cap in self.bucket_bytes_cap_list]
        elif not self.bucket_bytes_cap_default:
            options.bucket_cap_mb = self.bucket_bytes_cap / _MIB
        options.gradient_as_bucket_view = self.gradient_as_bucket_view
        if self._mixed_forward is not None:
            options.reduce_dtype = self._mixed_forward.reduce_dtype
        options.compression = core_of(self.compression)

        tensors = ModuleTensors.of(self.module, self.parameters_to_ignore)
        self._take_over(tensors)
        self._communicator = communicator_of(self.process_group)
        self._core = _C.Ddp(
            names=tensors.names,
            parameters=tensors.parameters,
            sparse_gradient=tensors.sparse_gradient,
            buffers=[*self.modules_buffers, *tensors.integers],
            communicator=self._communicator,
            options=options,
        )
        if self.compression is not None:
            note_codes(self, self._core, wraps="module.")
        self._divisor = self.process_group.size()
        # Not of the wrapper itself, which would keep itself alive.
        self._layer_watch = LayerWatch(self.module)
        self._core.watch_module(*watching(self))
        self.reducer = Reducer(self)  # type: ignore[assignment]
        self.logger = None

    def _take_over(self, tensors: ModuleTensors) -> None:
        self._tensors = self._present = tensors
        self._reduced_parameters = tensors.parameters
        self._buffer_places = tensors.buffer_places
        self._assign_modules_buffers()
        note_averaging(tensors.parameters, self)
        lead(self)

    def _look_at_module(self, thoroughly: bool) -> ModuleTensors | None:
        """Returns what the module has now, unless that is what the core knows."""
        self._present = self._tensors
        watch = self._layer_watch
        if watch.module is self.module and watch.is_as_it_was(thoroughly=thoroughly):
            return None
        present = ModuleTensors.of(self.module, self.parameters_to_ignore)
        if present.has_those_of(self._tensors):
            self._layer_watch = LayerWatch(self.module)
        elif not present.is_lent():
            self._present = present
            return present
        return None

    def _adopt_module(self) -> None:
        """All ranks have agreed on what ``_look_at_module`` returned last."""
        self._take_over(self._present)
        self._module_parameters = [
            p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore
        ]
        if self._mixed_forward is not None:
            self._mixed_forward.module = self.module
        self._layer_watch = LayerWatch(self.module)
        self._setup_in_backward_optimizers()

    # forward

    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; see the class for what its backward then does.

        Raises:
            torch.distributed.DistBackendError: the group failed in an earlier step.
        """
        with torch.autograd.profiler.record_function("trireme::ddp.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(output)

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._lazy_init_ran:
            self._setup_in_backward_optimizers()
            self._lazy_init_ran = True
        leader = leader_of(self)
        if torch.is_grad_enabled() and not _here.depth_of(leader):
            leader._core.before_forward()
        self._notify_join()
        if self._join_config.enable:
            check_joined_batch_norms(self.module, self._join_config, AREA, self.process_group)
        if leader._core.is_held() and leader._core.has_averaged():
            self.require_forward_param_sync = True
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            # A forward without gradients has no backward that joined ranks would have to follow.
            without_backward = not torch.is_grad_enabled()
            self._check_global_requires_backward_grad_sync(is_joined_rank=without_backward)
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._mixed_forward is not None:
            inputs, kwargs = self._mixed_forward.cast_inputs(inputs, kwargs)
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._count_forward()
        try:
            with self._inside_ddp_forward():
                if self._mixed_forward is not None:
                    return self._mixed_forward(inputs, kwargs)
                return self.module(*inputs, **kwargs)
        finally:
            self._count_forward_out()

    @torch._disable_dynamo
    def _count_forward(self) -> None:
        _here.enter(self)

    @torch._disable_dynamo
    def _count_forward_out(self) -> None:
        _here.leave(self)

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        synchronize = self.require_backward_grad_sync and not torch_averages()
        if torch.is_grad_enabled():
            leader = leader_of(self)
            if not _here.depth_of(leader):
                tensors, all_found = find_tensors(output)
                leader._core.after_forward(tensors, synchronize, all_found)
            # In a pipeline no forward tells which backward will average.
            self.require_forward_param_sync = synchronize and not leader._core.is_held()
        else:
            self.require_forward_param_sync = False
        return output

    def last_step(self) -> dict[str, float]:
        """Says where the time of the last synchronized step went, on this rank's host clock.

        Keys: ``step``, ``forward_ms``, ``backward_ms``, ``waiting_ms`` (backward had nothing left
        to do but wait), ``exposed_comm_ms`` (the same), ``hidden_comm_ms`` (a collective was in
        flight while backward computed), ``reduced_bytes``, ``buckets``, ``streamed`` (they went as
        one stream of deposits through shared memory, summed up by the ranks themselves), and under
        ``compression`` ``sent_bytes`` (to other senders; an all-reduce counts once) and
        ``encode_ms``. On CUDA the device may still be at work when the host is done.
        """
        return self._core.last_step()

    # buffers

    def _sync_buffers(self) -> None:
        joining = self._join_config.enable
        root = self._find_common_rank(self._distributed_rank, True) if joining else 0
        if hasattr(self, "buffer_hook"):
            self._assign_modules_buffers()
            held = tuple(self.modules_buffers)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(held):
                self._sync_module_buffers(root)
            return
        self._core.sync_buffers(self._current_buffers(), root)

    def _current_buffers(self) -> list[torch.Tensor]:
        """The buffers as they are now (they may have been reassigned), tied ones once."""
        # A ScriptModule keeps its buffers in no dict.
        found = (
            layer._buffers[name] for layer, name in self._buffer_places if name in layer._buffers
        )
        return list({id(buffer): buffer for buffer in found if buffer is not None}.values())

    @property
    def broadcast_buffers(self) -> bool:
        """The former name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # uneven inputs

    def _notify_join(self) -> None:
        """Tells joined ranks that this one still trains; counts the active ones if they divide."""
        divisor = self.process_group.size()
        work = Join.notify_join_context(self)
        if work is not None and not self._divide_by_initial_world_size:
            work.wait()
            divisor = int(work.get_future().value()[0].item())
        if divisor != self._divisor:
            self._divisor = divisor
            self._core.set_divisor(divisor)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See ``join()``; keyword ``divide_by_initial_world_size`` as there."""
        return DdpJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    # communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replaces the all-reduce of each bucket by ``hook(state, bucket) -> Future[Tensor]``.

        ``bucket`` is a ``torch.distributed.GradBucket``; its buffer is not yet divided by the
        number of ranks: the hook divides. The second argument may have any name. Once per module,
        before the first backward.

        Raises:
            TypeError, ValueError: not a callable of two arguments, or annotated with other types.
            RuntimeError: a hook is registered already.
        """
        check_comm_hook(hook, self.process_group)
        self._core.register_comm_hook(state, returning_future(hook, self.process_group))
        self._comm_hooks.append((hook, state))

    def _setup_in_backward_optimizers(self) -> None:
        step = step_in_backward(self._reduced_parameters) if leader_of(self) is self else None
        if step is not None:
            self._core.set_delivered_callback(step)

    # manual finalization

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the caller ends each synchronized backward by ``finalize_backward()``.

        Set it before forward or after finalization. ``backward()`` then returns with collectives
        in flight.
        """
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self._core.set_manual_finalization(required)
        self._require_manual_backward_finalization = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether ``finalize_backward()`` must wait for the end of ``backward()``: always."""
        return self._core.should_finalize_after_backward()

    def finalize_backward(self) -> None:
        """Waits for the collectives of the last backward; then every ``.grad`` is final.

        Raises:
            RuntimeError: there is no synchronized backward to finalize.
        """
        self._core.finalize_backward()

    # copies

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self.process_group = new_process_group
        self._rebuild_core()

    def _rebuild_core(self) -> None:
        self._build_core(init_sync=False, init_sync_buffers=False)
        self._lazy_init_ran = False
        if self._require_manual_backward_finalization:
            self._core.set_manual_finalization(True)
        for hook, state in self._comm_hooks:
            self._core.register_comm_hook(state, returning_future(hook, self.process_group))

    def _portable_state(self) -> dict[str, Any]:
        rebuilt = {"process_group", "reducer", "_core", "_communicator"}
        rebuilt |= {"_reduced_parameters", "_buffer_places", "_tensors", "_present"}
        rebuilt |= {"_layer_watch", "_outer", "_led"}
        return {key: value for key, value in self.__dict__.items() if key not in rebuilt}

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return self._portable_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.process_group = resolve_process_group(None, None, self.module)
        self._rebuild_core()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A copy over the same process group; works for any group, unlike pickling."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        nn.Module.__setstate__(clone, copy.deepcopy(self._portable_state(), memo))
        clone.process_group = self.process_group
        clone._rebuild_core()
        return clone
