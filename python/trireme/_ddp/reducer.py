"""What torch code reaches for behind ``ddp.reducer``."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from trireme import _C
from trireme._ddp import refuse
from trireme._ddp.nesting import leader_of
from trireme._ddp.torch_names import TorchNames


class Reducer:
    """The few methods of torch's reducer that others call, over the C++ core of one module."""

    def __init__(self, ddp: TorchNames) -> None:
        self._ddp = weakref.ref(ddp)

    @property
    def _core(self) -> _C.Ddp:
        """The one that averages for the module."""
        ddp = self._ddp()
        assert ddp is not None, "the module of this reducer is gone"
        return leader_of(ddp)._core

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor] = ()) -> None:
        """The next backward synchronizes, whatever its forward said: torch's pipelining asks."""
        self._core.prepare_for_backward()

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt when a backward is armed; never here."""
        return False

    def _delay_all_reduce(self) -> None:
        """Lightning calls it after the first backward of a static graph, for torch's reducer has
        averaged nothing until then. Here every backward that averages ends with final gradients,
        and one of them must have been.

        Raises:
            RuntimeError: no backward has averaged yet.
        """
        core = self._core
        if core.last_step()["step"] == 0:
            refuse(
                "got _delay_all_reduce() before any backward that averages gradients",
                "Run forward outside of no_sync(), or call reducer.prepare_for_backward() first.",
                kind=RuntimeError,
            )

    def _install_post_backward_futures(self, futures: list[Any]) -> None:
        """Waits for a buffer hook at once: what a buffer holds after forward is final."""
        torch.futures.wait_all(futures)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        ddp = self._ddp()
        assert ddp is not None
        work = dist.all_reduce(bucket.buffer(), group=ddp.process_group, async_op=True)
        return work.get_future()
