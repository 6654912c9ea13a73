"""Compression as a communication hook, of Trireme's DDP and of torch's."""

import torch
import torch.distributed as dist
from torch import nn

from trireme import _C
from trireme._core.compression import Compression
from trireme._core.errors import Area
from trireme._core.group_communicator import communicator_of

_AREA = Area("compression")


class HookState:
    """What ``hook`` needs to compress the gradients of a module, and keeps of them.

    Args:
        compression: a method of ``trireme.compression``, the same on all ranks.
        model: whose gradients are averaged, wrapped or not; residuals belong to its parameters.
        process_group: over which they are averaged; the default group if None.

    Residuals are not in checkpoints: ``DistributedDataParallel(compression=)`` keeps them there.

    Raises:
        ValueError: methods differ between ranks.
    """

    def __init__(
        self,
        compression: Compression,
        model: nn.Module,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.compression = compression
        self.process_group = _AREA.expect_group(
            process_group, "Compress on the ranks of the group only."
        )
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._model = model  # keeps the parameters
        self._coder = _C.HookCoder(communicator_of(self.process_group), compression._core())

    def _average(self, bucket: dist.GradBucket) -> None:
        parameters = bucket.parameters()
        names = [self._names[id(parameter)] for parameter in parameters]
        self._coder.average(bucket.buffer(), parameters, names, bucket.index())


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that compresses: ``ddp.register_comm_hook(HookState(...), hook)``.

    Each bucket is exchanged before backward goes on.
    """
    state._average(bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
