"""Private names of torch's DistributedDataParallel that other code calls, answered in our terms."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from trireme import _C
from trireme._ddp import refuse


class TorchNames(TorchDDP):
    """Between torch's class and ours: nothing here is on the path of a step."""

    module: nn.Module
    process_group: dist.ProcessGroup
    _core: _C.Ddp
    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _outer: weakref.ref[TorchNames] | None = None
    """The one around it; see nesting.py."""
    _led: list[TorchNames]
    """Those inside of it."""

    if TYPE_CHECKING:  # torch's methods that we call; torch gives them no types

        def _assign_modules_buffers(self) -> None: ...
        def _check_default_group(self) -> None: ...
        def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any: ...
        def _check_sync_bufs_post_fwd(self) -> bool: ...
        def _check_sync_bufs_pre_fwd(self) -> bool: ...
        def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int: ...
        def _sync_module_buffers(self, authoritative_rank: int) -> None: ...
        def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[Any, Any]: ...

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's two C++ hooks, by their Python twins: its library does not export them."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            got = f"got {comm_hook_type!r} as communication hook, expected a BuiltinCommHookType"
            next_step = "Pass one of torch.distributed.BuiltinCommHookType."
            refuse(got, next_step, self.process_group, kind=TypeError)
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        """Whether buckets are in their learned order, which hooks that step optimizers wait for."""
        return self._core.last_step()["step"] > 0

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {
            "module_name": type(self.module).__name__,
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "backend_name": dist.get_backend(self.process_group),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "find_unused_parameters": int(self.find_unused_parameters),
            "comm_hook": self._comm_hooks[0][0].__qualname__ if self._comm_hooks else "",
            "plan": self._core.describe_plan(),
            **self._core.last_step(),
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            refuse(
                f"got a sample rate of {sample_rate}, expected at least 1",
                "Leave it out: every step is measured anyway.",
                self.process_group,
            )

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """No sink is put on the outputs, so there is nothing to clone."""

    def _check_reducer_finalized(self) -> None:
        """A backward here is final when it returns."""

    def _remove_autograd_hooks(self) -> None:
        del self._core, self.reducer
