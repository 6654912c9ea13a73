"""What torch code reaches for behind ``ddp.reducer``."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from trireme import _C


class Reducer:
    """The few methods of torch's reducer that others call, over the C++ core of one module."""

    def __init__(self, core: _C.Ddp, group: dist.ProcessGroup) -> None:
        self._core = core
        self._group = group

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor] = ()) -> None:
        """The next backward synchronizes, whatever its forward said: torch's pipelining asks."""
        self._core.prepare_for_backward()

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt when a backward is armed; never here."""
        return False

    def _install_post_backward_futures(self, futures: list[Any]) -> None:
        """Waits for a buffer hook at once: what a buffer holds after forward is final."""
        torch.futures.wait_all(futures)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        return work.get_future()
